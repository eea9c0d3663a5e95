"""Which nats-server may carry our streams: what is asked of its version, in words."""

from __future__ import annotations

from nats.aio.client import Client

OLDEST = (2, 11)
"""Tests attack the shipped permissions on it and on the newest one."""
STRICT = (2, 12)
"""From here on JetStream answers only what is a request of its API, unless it is told otherwise; before, `jetstream { strict: true }` asks
for it. Without it any message that reaches a subject of that API, an acknowledgement too, is obeyed."""


def version_of(client: Client) -> tuple[int, int] | None:
    """Major and minor number of the server that this client is connected to; None where it tells none that can be read."""
    try:
        version = client.connected_server_version
        found = (int(version.major), int(version.minor))
    except ValueError:
        return None
    return found if found > (0, 0) else None


def objection(major: int, minor: int) -> str | None:
    """What is wrong with a server of this version; None: nothing."""
    if (major, minor) < OLDEST:
        return f"nats-server {major}.{minor} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that our permissions are tested on"
    return None


def advice(major: int, minor: int) -> str | None:
    """What its configuration must say that a newer server does by itself; None: nothing."""
    if (major, minor) < STRICT:
        return (
            f"nats-server {major}.{minor} reads requests of JetStream strictly only with `jetstream {{ strict: true }}`"
        )
    return None
