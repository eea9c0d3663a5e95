"""Measures a pull from another worker: over loopback, out of one slab and into another, with every check on both sides.

The same bytes go through a bare socket in turn with the pulls, so that whatever the machine does meanwhile affects
both. Both sides are threads of this process, and so share its interpreter; two workers do not.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.fetch.client import TcpTransport
from worker_connector.fetch.export import Held, SlabExport
from worker_connector.fetch.server import FetchServer
from worker_connector.fetch.tier import FetchTier, Pull
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.link.channel import RankReady
from worker_connector.memory.slab import HostSlab

MIB = 1024 * 1024
SIZES = (64 * 1024, MIB, 4 * MIB)
_TOKENS = 4
_BATCH_BYTES = 16 * MIB
_SECONDS = 120.0


@dataclass(frozen=True)
class PullRate:
    """What was measured for one block size."""

    block_bytes: int
    mib_per_s: float
    """By the clock, best of the rounds."""
    mib_per_cpu_s: float
    """By processor time of both sides."""
    ratio: float
    """Rate over that of a bare socket, by the clock; the median of the rounds."""


def measure(block_bytes: int, *, total: int = 128 * MIB, rounds: int = 5) -> PullRate:
    """Pulls `total` bytes in each round. RuntimeError if a block does not come, or holds other bytes: then no figure
    means anything."""
    blocks = max(1, total // block_bytes)
    source, lock, secret = _slab(blocks, block_bytes, filled=True), threading.RLock(), secrets.token_bytes(32)
    server = FetchServer("127.0.0.1", 0, secret, SlabExport(lock, lambda: source), deadline_seconds=_SECONDS)
    walls, owns, bare = [], [], []
    try:
        for _ in range(rounds):
            target = _slab(blocks, block_bytes, filled=False)
            wall, own = _timed(lambda target=target: _pull(server.port, secret, target, lock, blocks))  # type: ignore[misc]
            if not np.array_equal(target.slab.rows.numpy()[:, :8], source.slab.rows.numpy()[:, :8]):
                raise RuntimeError("pulled blocks hold other bytes")
            walls.append(wall)
            owns.append(own)
            bare.append(_timed(lambda: _bare(blocks * block_bytes))[0])
    finally:
        server.close()
    size = blocks * block_bytes / MIB
    ratios = sorted(plain / wall for plain, wall in zip(bare, walls, strict=True))
    return PullRate(block_bytes, size / min(walls), size / min(owns), ratios[len(ratios) // 2])


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


_DIGEST = b"d" * 32


def _tokens(blocks: int) -> bytes:
    return np.arange(_TOKENS * blocks, dtype="<u4").tobytes()


def _slab(blocks: int, block_bytes: int, *, filled: bool) -> Held:
    """A slab with room for one chain of blocks; `filled`: with the blocks in it, each with bytes of its own."""
    pool = RankReady(0, _TOKENS, (0,), (None,), block_bytes, "uint8", "bench", blocks)
    held = Held(pool, Ledger(blocks, _TOKENS), HostSlab(blocks, block_bytes), 0)
    held.slab.rows.zero_()
    if filled:
        tokens, step = _tokens(blocks), 4 * _TOKENS
        parent: BlockEntry | None = None
        for index in range(blocks):
            parent = held.ledger.enter(_DIGEST, parent, tokens[index * step : (index + 1) * step])
            assert parent is not None
            held.ledger.landed(parent)
            held.ledger.admit(parent)
            held.slab.rows[parent.slot, :block_bytes] = index % 251 + 1
        held.slab.seal(list(range(blocks)))
    return held


def _pull(port: int, secret: bytes, target: Held, lock: threading.RLock, blocks: int) -> None:
    tier = FetchTier(lock, lambda: target, lambda entries: None, lambda namespace, entries: None, lambda: None)
    deadline = time.monotonic() + _SECONDS
    pull = tier.plan(CacheNamespace(model="bench"), _DIGEST, _tokens(blocks), blocks)
    assert isinstance(pull, Pull)
    row = target.slab.row_bytes
    rows = np.empty((min(max(1, _BATCH_BYTES // row), 256), row), dtype=np.uint8)
    source = TcpTransport(secret).connect("127.0.0.1", port, deadline)
    try:
        while pull.at < blocks:
            before = pull.at
            stop = tier.land(pull, source.read(pull.wanted(len(rows)), rows, deadline), rows)
            if stop is not None or pull.at == before:
                raise RuntimeError(f"a pull ended after {pull.at} of {blocks} blocks: {stop}")
    finally:
        source.close()


def _bare(size: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        piece = memoryview(bytearray(MIB))

        def write() -> None:
            for _ in range(size // MIB):
                far.sendall(piece)

        writer = threading.Thread(target=write)
        writer.start()
        into, left = memoryview(bytearray(MIB)), size // MIB * MIB
        while left:
            left -= near.recv_into(into)
        writer.join()
