"""What a transport of blocks between workers must do, and no more: another one (NIXL, say) takes the place of TCP by
doing this.

The side that pulls names blocks by their keys, within one namespace, layout and shard, and gives the memory that they
go into. What a transport brings is a claim: whoever asked compares tokens and checksum himself before a block is
entered (fetch/tier.py). The side that has the blocks refuses what does not fit its own pool, and says with every answer
which life of its cache the blocks are of.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.keys import BlockKey

Rows = npt.NDArray[np.uint8]
"""Shape [n, padded size of a block] (memory/checksum.py)."""


class Why(str, Enum):
    """Why a pull ended before everything had come."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    UNAUTHORIZED = "unauthorized"
    """One side does not know the other's secret."""
    MALFORMED = "malformed"
    """It does not speak this protocol, or bytes were changed on the way."""
    LOST = "lost"
    """The connection ended in the middle."""
    BUSY = "busy"
    """It serves as many as it may."""
    FOREIGN = "foreign"
    """Its model, layout, block size or shard is another one."""
    RESET = "reset"
    """Its cache was reset meanwhile: what it sent is worth nothing."""


class FetchFailed(Exception):
    """A pull that cannot go on. Normal: the blocks are computed instead."""

    def __init__(self, why: Why, detail: str = "") -> None:
        self.why = why
        super().__init__(f"{why.value}: {detail}" if detail else why.value)


class Wanted(NamedTuple):
    """Consecutive blocks of one chain, and what they must be blocks of."""

    namespace: bytes
    """Digest of the CacheNamespace with the request's salt, adapter and media in it."""
    layout: str
    """Fingerprint of the KV layout (engine_api/geometry.py)."""
    shard: str
    """Tensor-parallel shard: rank/size."""
    tokens_per_block: int
    bytes_per_block: int
    keys: tuple[BlockKey, ...]
    weights: str = ""
    """Fingerprint of the model's weights (fetch/weights_fingerprint.py)."""


class Sent(NamedTuple):
    """One block, as its owner describes it."""

    tokens: bytes
    """Packed u32."""
    seal: int
    """Of its bytes, in a row whose rest is zero (memory/checksum.py)."""


class Answer(NamedTuple):
    """What a peer sent of the blocks that it was asked for."""

    life: str
    """Of the cache that all of these blocks were in when the last of them had been read. Another one than before: its
    cache was reset."""
    blocks: tuple[Sent, ...]
    """In the order of the keys; fewer where the owner has no more."""


class BlockSource(Protocol):
    """One other worker, connected and authenticated. For one thread."""

    def read(self, wanted: Wanted, into: Rows, deadline: float) -> Answer:
        """Brings as many of these blocks as there are, block i into row i, before `deadline` (`time.monotonic()`).
        Raises FetchFailed; rows may hold anything then."""

    def close(self) -> None:
        """Ends the connection; no read after it."""


class BlockTransport(Protocol):
    """Connects to other workers."""

    def connect(self, host: str, port: int, deadline: float) -> BlockSource:
        """Raises FetchFailed."""

    def close(self) -> None:
        """No more: what is in hand ends now, with FetchFailed. Any thread."""


class BlockExport(Protocol):
    """What a serving side needs of its cache. Any thread."""

    def life(self) -> str:
        """Changes when what the blocks hold is declared worthless, or the pool is rebuilt."""

    def foreign(self, wanted: Wanted) -> str | None:
        """The field in which the wanted blocks are not of this pool; None: they are."""

    def read(self, wanted: Wanted, key: BlockKey, into: Rows) -> Sent | None:
        """Copies one resident, sealed block into `into` (one row), checked against its seal; None where there is none
        such."""
