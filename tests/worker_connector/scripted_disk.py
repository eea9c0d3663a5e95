"""A scripted engine with a disk below its slab, and what tests ask about both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered, GenerationReset
from tests.worker_connector.harness import MIB, RecordingSink, settings
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine
from worker_connector.disk.index import DiskBlock
from worker_connector.disk.tier import DiskTier
from worker_connector.engine_api.request_view import pack_tokens
from worker_connector.rank.disk import RankDisk

SLOTS = 24
PROMPT = list(range(41))
"""Ten blocks, and a token that is left to compute."""


def with_disk(path: Path, *, disk_bytes: int = 64 * MIB, wait_ms: float = 200.0, **options: Any) -> ScriptedEngine:
    it = settings(MIB, disk_path=str(path), disk_bytes=disk_bytes, disk_wait_ms=wait_ms, **OPTIONS)
    return ScriptedEngine(it, **{"slots": SLOTS} | options)


def disk_of(engine: ScriptedEngine) -> RankDisk:
    found = engine.rank.disk_thread
    assert found is not None
    return found


def tier_of(engine: ScriptedEngine) -> DiskTier:
    life = engine.leader._life
    assert life is not None
    assert life.disk is not None
    return life.disk


def chain_of(engine: ScriptedEngine) -> list[DiskBlock]:
    """`PROMPT` on disk."""
    last = pack_tokens(PROMPT[36:40])
    (end,) = [end for end in tier_of(engine).index.ends() if end.tokens == last]
    return end.chain()


def settle(engine: ScriptedEngine) -> None:
    """The disk's thread does all that it was told."""
    while disk_of(engine).run_pending():
        pass


def crowd(engine: ScriptedEngine, prompts: int = SLOTS // 10 + 1, first: int = 1) -> None:
    """Fills the slab with other prompts; they are written behind as well."""
    for n in range(first, first + prompts):
        engine.serve([1000 * n + i for i in range(41)])
        settle(engine)


def stop(engine: ScriptedEngine) -> None:
    engine.parts.close()
    engine.rank.close()


def donors(sink: RecordingSink) -> dict[str, tuple[int, str]]:
    """What a router believes: donor id -> (tokens, tier)."""
    found: dict[str, tuple[int, str]] = {}
    for event in sink.donor_events:
        data = event.data
        if isinstance(data, GenerationReset):
            found.clear()
        elif isinstance(data, DonorRegistered):
            found[data.donor_id] = (data.token_count, data.location.tier.value)
        elif isinstance(data, DonorEvicted):
            found.pop(data.donor_id)  # evicting what was never registered would be our fault
    return found


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
