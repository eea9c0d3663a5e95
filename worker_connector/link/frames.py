"""Frames on a stream socket: a length of four bytes, big-endian, and that many bytes of payload."""

from __future__ import annotations

import socket
import struct
import time

_LENGTH = struct.Struct(">I")
_AT_ONCE = 1024 * 1024
"""Bytes that one `recv` asks for: a peer that announces a large frame and sends nothing costs no more memory."""


class WireError(ValueError):
    """What was read breaks its protocol, or what is to be sent is too large for it."""


def framed(payload: bytes, limit: int) -> bytes:
    """The payload behind its length. WireError for one of more than `limit` bytes."""
    _check(len(payload), limit)
    return _LENGTH.pack(len(payload)) + payload


def read_frame(connection: socket.socket, limit: int, deadline: float | None = None) -> bytes:
    """Waits for one frame and returns its payload. WireError for one of more than `limit` bytes, EOFError where the
    other side has closed the connection, TimeoutError after the socket's own timeout. `deadline` (`time.monotonic()`)
    is for the whole frame, and changes the socket's timeout."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    _check(size, limit)
    return _exactly(connection, size, deadline)


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise WireError(f"a frame of {size} bytes, at most {limit} are allowed")


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the time for the message is over")
            connection.settimeout(left)
        part = connection.recv(min(size - len(parts), _AT_ONCE))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)
