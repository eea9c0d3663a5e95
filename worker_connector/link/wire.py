"""Messages between a leader and its ranks in other processes: length-prefixed msgpack frames over a Unix-domain socket.

Nothing is unpickled. A frame has at most `MAX_FRAME` bytes, has one of the types below, and is refused whole otherwise.
Results are numbered within a session; the leader acknowledges them, and what is not acknowledged is sent again over the
next connection.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import NamedTuple, TypeVar

import msgspec

from worker_connector.disk.messages import DiskFound, DiskResult
from worker_connector.link.channel import (
    ForwardDone,
    LoadDone,
    LoadGivenUp,
    RankReady,
    RankResult,
    SaveDone,
    SlotsDamaged,
)

PROTOCOL = 1
MAX_FRAME = 1024 * 1024
MAX_FOUND = 32
"""Blocks in one message about what a disk holds."""
MAX_SLOTS = 8_192
"""In one message about damage."""
_LENGTH = struct.Struct(">I")


WireResult = RankReady | LoadDone | LoadGivenUp | ForwardDone | SaveDone | SlotsDamaged | DiskResult


class Endpoint(NamedTuple):
    """Where the leader listens; travels with the engine's own broadcast of the metadata."""

    path: str
    token: str
    machine: str
    """Of the leader. A rank on another one cannot reach the socket."""


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """First frame of a connection, from the rank."""

    protocol: int
    token: str
    rank: int
    session: str


class Numbered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A result; numbers of a session begin at 1 and have no gaps."""

    number: int
    result: WireResult


class Seen(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the leader: everything of this session up to `number` was taken. Its first frame, and after each result."""

    number: int


class WireError(ValueError):
    """A message breaks this protocol, or is too large for it."""


FromRank = Hello | Numbered
_FROM_RANK = msgspec.msgpack.Decoder(FromRank)
_FROM_LEADER = msgspec.msgpack.Decoder(Seen)
_ENCODER = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


def frame(message: Hello | Numbered | Seen) -> bytes:
    """The message as msgpack, behind its length. WireError beyond `MAX_FRAME` bytes."""
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_FRAME:
        raise WireError(f"a frame of {len(payload)} bytes, at most {MAX_FRAME} are allowed")
    return _LENGTH.pack(len(payload)) + payload


def split(result: RankResult) -> list[WireResult]:
    """Splits a result into messages that are each small enough for a frame, for blocks of up to some thousand
    tokens."""
    if isinstance(result, DiskFound) and len(result.blocks) > MAX_FOUND:
        starts = range(0, len(result.blocks), MAX_FOUND)
        ends = len(result.blocks) - MAX_FOUND
        return [
            msgspec.structs.replace(result, blocks=result.blocks[at : at + MAX_FOUND], last=result.last and at >= ends)
            for at in starts
        ]
    if not isinstance(result, SlotsDamaged) or len(result.slots) <= MAX_SLOTS:
        return [result]
    parts = range(0, len(result.slots), MAX_SLOTS)
    return [SlotsDamaged(result.rank, result.slots[at : at + MAX_SLOTS], result.loaded) for at in parts]


def read_from_rank(connection: socket.socket, deadline: float | None = None) -> Hello | Numbered:
    """Reads one message, and blocks meanwhile. EOFError at the end, WireError for what is no message, TimeoutError as
    the socket says. `deadline` (`time.monotonic()`): for the whole message; sets the socket's timeout."""
    return _decode(_FROM_RANK, _read(connection, deadline))


def read_from_leader(connection: socket.socket) -> Seen:
    """As `read_from_rank`, without a deadline."""
    return _decode(_FROM_LEADER, _read(connection))


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error


def _read(connection: socket.socket, deadline: float | None = None) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if size > MAX_FRAME:
        raise WireError(f"a frame of {size} bytes, at most {MAX_FRAME} are allowed")
    return _exactly(connection, size, deadline)


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the time for the message is over")
            connection.settimeout(left)
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


def machine_id() -> str:
    """Names this machine until it is booted again; empty where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as line:
            return line.read().strip()
    except OSError:
        return ""
