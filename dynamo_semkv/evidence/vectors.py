"""VectorIndex: the windows of one partition's donors as vectors, in usearch (HNSW, int8). A partition has an index of
its own, so a search needs no filter and cannot see another tenant. Needs the extra `embeddings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_semkv.evidence.encoder import Vectors

BYTES_OVERHEAD = 149
"""Of a vector beside its `dimension` bytes: links, key, level (533 bytes measured for 384 dimensions)."""


class Near(NamedTuple):
    """For each window asked for, [n, k], best first."""

    rows: npt.NDArray[np.int64]
    """Donor rows; -1 where nothing was found."""
    windows: npt.NDArray[np.int64]
    similarity: npt.NDArray[np.float32]
    """Cosine, in [-1, 1]."""


class VectorIndex:
    """Not thread-safe. Rows are small integers of the caller's; a row has at most 2**16 windows."""

    def __init__(self, dimension: int) -> None:
        from usearch.index import Index

        self.dimension = dimension
        self._index: Any = Index(ndim=dimension, metric="cos", dtype="i8", connectivity=16)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all vectors and their links."""
        return len(self) * (self.dimension + BYTES_OVERHEAD)

    def add(self, row: int, first_window: int, vectors: Vectors) -> None:
        """Raises ValueError for another dimension or a value that is not finite: either would make good donors
        unreachable."""
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            raise ValueError(f"vectors: got shape {vectors.shape}, allowed: [n, {self.dimension}]")
        if not np.isfinite(vectors).all():
            raise ValueError("vectors: got a value that is not finite")
        keys = (np.int64(row) << 16) + first_window + np.arange(len(vectors))
        self._index.add(keys.astype(np.uint64), vectors)

    def remove(self, row: int, windows: Sequence[int]) -> None:
        """Takes windows of one row out of every later search."""
        self._index.remove(np.array([(row << 16) + window for window in windows], np.uint64))

    def near(self, vectors: Vectors, count: int) -> Near:
        """For each vector, shape [n, dimension], its `count` nearest windows; fewer where the index holds fewer."""
        shape = (len(vectors), count)
        found = Near(np.full(shape, -1, np.int64), np.full(shape, -1, np.int64), np.full(shape, -1.0, np.float32))
        if len(self) == 0:
            return found
        for n, vector in enumerate(vectors):
            matches = self._index.search(vector, min(count, len(self)))
            keys = np.asarray(matches.keys).astype(np.int64)
            found.rows[n, : len(keys)] = keys >> 16
            found.windows[n, : len(keys)] = keys & 0xFFFF
            found.similarity[n, : len(keys)] = 1.0 - np.asarray(matches.distances)
        return found
