"""Forms that a text must have and no pattern can say: paths, hosts, URLs. Pure; nothing is looked up.

A form goes into a field's annotation as `Meta(extra=extra(PATH))`; limits.py asks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_MAX_NAME = 253
_NATS_SCHEMES = ("nats", "tls")
_WEB_SCHEMES = ("ws", "wss")
_WHOLE = re.compile(r"[a-z]+://")
REDACTED = "<redacted>"


class Form(NamedTuple):
    """What a text must look like."""

    allowed: str
    """For error texts."""
    wrong: Callable[[str], str | None]
    """The part of a text that does not fit, without passwords; None when all of it does."""


def extra(form: Form) -> dict[str, Any]:
    """For `Meta(extra=...)`."""
    return {"form": form}


def _plain(text: str) -> bool:
    return text.isprintable() and text == text.strip()


def is_host(text: str) -> bool:
    """An IP address, or a name that a resolver may know. What ends in a number is an address or nothing (RFC 1123,
    2.1); a name that is too long, or has an empty label, ends Python's resolver with a UnicodeError."""
    if is_address(text):
        return True
    name = text.removesuffix(".")
    labels = name.split(".")
    return len(name) <= _MAX_NAME and all(map(_LABEL.fullmatch, labels)) and not _NUMBER.fullmatch(labels[-1])


def is_address(text: str) -> bool:
    """Also one with the zone of an IPv6 address, of which Python takes any characters."""
    if not text.isprintable() or " " in text:
        return False
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """A name is one only where it is `localhost`: `127.0.0.1.example.org` is somebody's machine."""
    return ip_address(host).is_loopback if is_address(host) else host.lower() == "localhost"


def split_url(text: str, schemes: tuple[str, ...]) -> SplitResult | None:
    """None for what is no URL of one of the schemes with a host and, if there is one, a port in [1, 65535]."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    if not text.startswith(tuple(f"{scheme}://" for scheme in schemes)) or not text.isprintable() or " " in text:
        return None
    sound = port != 0 and not parts.netloc.endswith(":") and "\\" not in text
    return parts if sound and is_host(parts.hostname or "") else None


def _no_host(text: str) -> str | None:
    return None if is_host(text) else text


def _no_address(text: str) -> str | None:
    return None if is_address(text) else text


def _no_network(text: str) -> str | None:
    if not _plain(text):
        return text
    for part in text.split(","):
        try:
            ip_network(part.strip(" "))
        except ValueError:
            return part.strip(" ")
    return None


def _no_collector(text: str) -> str | None:
    parts = split_url(text, ("http", "https"))
    return None if parts is not None and not parts.fragment else _without_password(text, text)


def _no_broker(text: str) -> str | None:
    """As the client reads them: one that it cannot read, or several that it does not take together, would be tried for
    ever."""
    if not _plain(text):
        return _without_password(text, text)
    found = set()
    for part in text.split(","):
        url = part.strip(" ")
        parts = split_url(url if _WHOLE.match(url) else f"nats://{url}", (*_NATS_SCHEMES, *_WEB_SCHEMES))
        if parts is None or parts.hostname == "none" or parts.fragment:
            return _without_password(url, text)
        if parts.scheme in _NATS_SCHEMES and (parts.path.strip("/") or parts.query):
            return _without_password(url, text)
        found.add(parts.scheme in _WEB_SCHEMES)
    return None if len(found) == 1 else _without_password(text, text)


def _without_password(part: str, text: str) -> str:
    """A comma or a slash in a password makes parts of it look like URLs of their own."""
    if "@" not in text:
        return part
    return f"...@{part.rpartition('@')[2]}" if "@" in part else REDACTED


TEXT = Form("printable text without blanks at its ends", lambda text: None if _plain(text) else text)
PATH = Form(
    "a path without blanks at its ends and without ~ (which is not expanded)",
    lambda text: None if _plain(text) and not text.startswith("~") else text,
)
HOST = Form("an IP address or a host name", _no_host)
ADDRESS = Form("an IP address", _no_address)
NETWORKS = Form("networks such as 10.0.0.0/8, with commas between", _no_network)
COLLECTOR = Form("an http or https URL with a host and at most a port in [1, 65535] and a path", _no_collector)
BROKERS = Form(
    "URLs such as nats://host:4222, with commas between: nats or tls, or else ws or wss, a host, a port in [1, 65535]",
    _no_broker,
)

__all__ = ["ADDRESS", "BROKERS", "COLLECTOR", "HOST", "NETWORKS", "PATH", "TEXT", "Form", "extra", "is_loopback"]
