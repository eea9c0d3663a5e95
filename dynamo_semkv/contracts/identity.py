"""Identities: which replica, which route, which attempt, which donor, which engine generation.

A replica is always the pair (worker, data-parallel rank): every rank has its own KV cache behind one worker id, so a
donor on rank 1 says nothing about rank 0. The engine process does not know its Dynamo instance id; both sides know
`DYN_STABLE_ROUTING_ID`, so the engine speaks as `StableReplica` and the router maps it to the live `ReplicaKey`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from typing import NamedTuple, NewType

from dynamo_semkv.contracts.errors import ContractError

U64_MAX = 2**64 - 1
DP_RANK_MAX = 65_535

RouteId = NewType("RouteId", str)
"""Ours, 32 hex digits, unique per attempt: a migrated request gets a new one, so that a late report of the first
attempt cannot be credited to the second."""

DonorId = NewType("DonorId", str)
"""1 to 128 printable characters without blanks. Ours are 32 hex digits; SemBlend's may be any string."""

Generation = NewType("Generation", str)
"""One life of an engine's KV cache. Compared for equality only, never by age: clocks of two machines do not agree."""

_DONOR_ID = re.compile(r"[\x21-\x7e]{1,128}")
_STABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HEX32 = re.compile(r"[0-9a-f]{32}")


class ReplicaKey(NamedTuple):
    """A live routing target of Dynamo: instance id (u64) and data-parallel rank."""

    worker_id: int
    dp_rank: int


class StableReplica(NamedTuple):
    """The same target named by what survives a restart: `DYN_STABLE_ROUTING_ID` and data-parallel rank."""

    stable_routing_id: str
    dp_rank: int


def new_route_id() -> RouteId:
    """A random id for one route, 32 hex digits."""
    return RouteId(os.urandom(16).hex())


def new_donor_id() -> DonorId:
    """A random id for one donor, 32 hex digits."""
    return DonorId(secrets.token_hex(16))


def new_generation() -> Generation:
    """A random id for one generation of a cache, 16 hex digits."""
    return Generation(secrets.token_hex(8))


def check_route_id(value: str) -> RouteId:
    """The id itself; ContractError if it is none."""
    if not _HEX32.fullmatch(value):
        raise ContractError("route_id", value, "32 lower-case hex digits")
    return RouteId(value)


def is_donor_id(value: str) -> bool:
    """Whether the text can be a donor's id: 1 to 128 printable ASCII characters without blanks."""
    return _DONOR_ID.fullmatch(value) is not None


def check_donor_id(value: str) -> DonorId:
    """The id itself; ContractError if it is none."""
    if not is_donor_id(value):
        raise ContractError("donor_id", value, "1 to 128 printable ASCII characters without blanks")
    return DonorId(value)


def check_stable_routing_id(value: str, field: str = "stable_routing_id") -> str:
    """The id becomes a subject token on the bus, so it may not carry wildcards or blanks. Dots are escaped there."""
    if not _STABLE_ID.fullmatch(value):
        raise ContractError(field, value, "1 to 128 characters of A-Z a-z 0-9 . _ : -")
    return value


def check_u64(field: str, value: int) -> int:
    """The value itself; ContractError if it does not fit into 64 bits."""
    if not 0 <= value <= U64_MAX:
        raise ContractError(field, value, f"an integer in [0, {U64_MAX}]")
    return value


def stable_worker_id(stable_routing_id: str) -> int:
    """The u64 that stands for an engine process in donor events, where the wire format wants a `worker_id`.

    blake2b-64 of the stable id. The router knows the live workers' stable ids and so maps it back.
    """
    check_stable_routing_id(stable_routing_id)
    digest = hashlib.blake2b(stable_routing_id.encode(), digest_size=8, person=b"semkv-worker").digest()
    return int.from_bytes(digest, "little")
