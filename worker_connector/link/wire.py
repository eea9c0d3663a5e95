"""Messages between a leader and its ranks in other processes: msgpack in frames (link/frames.py) over a Unix-domain
socket.

Nothing is unpickled. A frame that is larger than `MAX_FRAME`, or whose payload is none of the types below, is refused
whole. A rank numbers its results within a session; the leader acknowledges them, and the rank sends those that are not
acknowledged again over its next connection.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from worker_connector.disk.messages import DiskFound
from worker_connector.link.channel import RankResult, SlotsDamaged
from worker_connector.link.frames import WireError, framed, read_frame

PROTOCOL = 1
MAX_FRAME = 1024 * 1024
"""Bytes."""
MAX_FOUND = 32
"""Blocks in one message on what a disk holds."""
MAX_SLOTS = 8_192
"""Slots in one message on damage."""


class Endpoint(NamedTuple):
    """Where the leader listens. It reaches the ranks with the metadata, which the engine broadcasts."""

    path: str
    token: str
    """A random secret, which a rank must show."""
    machine: str
    """`machine_id` of the leader; a rank on another machine cannot reach the socket."""


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first message of a connection, from the rank. `session` is a random name."""

    protocol: int
    token: str
    rank: int
    session: str


class Numbered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A result, from the rank. The numbers of a session begin at 1 and have no gaps."""

    number: int
    result: RankResult


class Acknowledged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The leader has taken every result of this session up to `number`. It answers `Hello` and each `Numbered`."""

    number: int


FromRank = Hello | Numbered
_FROM_RANK = msgspec.msgpack.Decoder(FromRank)
_FROM_LEADER = msgspec.msgpack.Decoder(Acknowledged)
_ENCODER = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


def frame(message: Hello | Numbered | Acknowledged) -> bytes:
    """The message as a frame. WireError beyond `MAX_FRAME` bytes."""
    return framed(_ENCODER.encode(message), MAX_FRAME)


def split(result: RankResult) -> list[RankResult]:
    """Splits a result into parts that fit a frame each, where a block has some thousand tokens at most."""
    if isinstance(result, DiskFound):
        parts = _slices(result.blocks, MAX_FOUND)
        last = len(parts) - 1
        return [
            msgspec.structs.replace(result, blocks=blocks, last=result.last and number == last)
            for number, blocks in enumerate(parts)
        ]
    if isinstance(result, SlotsDamaged):
        return [msgspec.structs.replace(result, slots=slots) for slots in _slices(result.slots, MAX_SLOTS)]
    return [result]


def _slices(items: Sequence[Any], size: int) -> list[Any]:
    return [items[at : at + size] for at in range(0, max(len(items), 1), size)]


def read_from_rank(connection: socket.socket, deadline: float | None = None) -> Hello | Numbered:
    """Waits for one message of a rank. Errors and `deadline` as in `read_frame`; WireError also for a payload that is
    no such message."""
    return _decode(_FROM_RANK, read_frame(connection, MAX_FRAME, deadline))


def read_from_leader(connection: socket.socket) -> Acknowledged:
    """Waits for one message of the leader. Errors as in `read_from_rank`."""
    return _decode(_FROM_LEADER, read_frame(connection, MAX_FRAME))


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error


def machine_id() -> str:
    """A name of this machine until its next boot; empty where the system gives none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as line:
            return line.read().strip()
    except OSError:
        return ""
