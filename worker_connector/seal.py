"""The checksum of a block's bytes: a 64-bit weighted sum over its words, computed for many blocks at once.

A block is read as a grid of 64-bit words, rows of 512. Its seal is `sum(word[r, c] * (even[r] + odd[c])) mod 2^64`, where the weights are
fixed pseudo-random numbers. Every weight is odd, so a change of a single word, and with it any burst of up to 64 bits within a word,
always changes the seal; other damage goes unseen with a chance of about 2^-63, except for changes that keep the sum of every row and
of every column, which no fault of memory makes. It is an integrity check against accidents, never an identity: identity is tokens.

Why not a CRC: this is two numpy reductions that run at memory speed (measured here about 15 GB/s for 16 KiB blocks in batches and 20
GB/s for 1 MiB ones, against 2.6 GB/s for zlib.crc32), release the GIL, need no further package, and are plain 64-bit sums, which a
GPU can compute on its own pages in the same way.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

ROW_WORDS = 512
ROW_BYTES = ROW_WORDS * 8

Words = npt.NDArray[np.uint64]
_SEED = 0x5EA1


def padded(size: int) -> int:
    """Bytes of the slab row that holds a block of `size` bytes: whole rows of the grid."""
    return -(-size // ROW_BYTES) * ROW_BYTES


@cache
def _weights(rows: int) -> tuple[Words, Words]:
    random = np.random.Generator(np.random.PCG64(_SEED))
    odd = random.integers(0, 2**63, size=ROW_WORDS, dtype=np.uint64) | np.uint64(1)
    even = random.integers(0, 2**63, size=rows, dtype=np.uint64) << np.uint64(1)
    return even, odd


def seals(blocks: npt.NDArray[np.uint8]) -> Words:
    """Seal of each row of a C-contiguous array [n, padded size]; shape [n]."""
    count, size = blocks.shape
    grid = blocks.view(np.uint64).reshape(count, size // ROW_BYTES, ROW_WORDS)
    even, odd = _weights(grid.shape[1])
    by_row = grid.sum(axis=2, dtype=np.uint64)
    by_column = grid.sum(axis=1, dtype=np.uint64)
    total: Words = (by_row * even).sum(axis=1, dtype=np.uint64) + (by_column * odd).sum(axis=1, dtype=np.uint64)
    return total
