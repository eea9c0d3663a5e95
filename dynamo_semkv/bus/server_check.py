"""Which nats-server may carry our streams: its version, and that it refuses requests of JetStream's API that it does
not understand."""

from __future__ import annotations

import asyncio
import json

import nats.errors
from nats.aio.client import Client

from dynamo_semkv.bus.streams import STREAMS

OLDEST = (2, 11)
"""The first version that can be strict. Tests attack the shipped permissions on it and on the newest one."""

LENIENT = (
    "the broker obeys requests of JetStream with fields that it does not know, so any message that reaches a subject "
    "of that API, an acknowledgement too: it needs `strict: true` in the jetstream block of its configuration (the "
    "default from nats-server 2.12 on)"
)

_API_SECONDS = 3.0
_INVALID_JSON = 10025
_UNKNOWN_FIELD = json.dumps({"semkv_is_this_refused": True}).encode()


def version_of(client: Client) -> tuple[int, int] | None:
    """Major and minor number of the server that this client is connected to; None where it tells none that can be
    read."""
    try:
        version = client.connected_server_version
        found = (int(version.major), int(version.minor))
    except ValueError:
        return None
    return found if found > (0, 0) else None


def objection(version: tuple[int, int] | None) -> str | None:
    """What is wrong with a server of this version; None: nothing, or the version is not known."""
    if version is not None and version < OLDEST:
        told, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST))
        return f"nats-server {told} is older than {oldest}, the oldest that our permissions are tested on"
    return None


async def is_strict(client: Client) -> bool | None:
    """Asks for a stream of ours with a field that does not exist, which changes nothing. None: no answer that says so,
    since this user may not ask or since the stream is not there."""
    try:
        answer = await client.request(f"$JS.API.STREAM.INFO.{STREAMS[0]}", _UNKNOWN_FIELD, timeout=_API_SECONDS)
        said = json.loads(answer.data)
        if "error" in said:
            return True if said["error"].get("err_code") == _INVALID_JSON else None
        return False if "config" in said else None
    except (nats.errors.Error, asyncio.TimeoutError, ValueError, TypeError, AttributeError, RecursionError):
        return None
