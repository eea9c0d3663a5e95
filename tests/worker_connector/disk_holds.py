"""Requests that are held at the door of a scripted engine, for a prompt that is on disk only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.worker_connector.scripted import ScriptedEngine
from tests.worker_connector.scripted_disk import PROMPT, chain_of, crowd, settle, with_disk
from worker_connector.engine_api.request_view import pack_tokens
from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait

LONG = 60_000.0
"""Milliseconds: a test that waited for it would not end."""


def below(path: Path, wait_ms: float = LONG, **options: Any) -> tuple[ScriptedEngine, DiskPrefetchWait]:
    """`PROMPT` is on disk, and not in the slab any more; a door with the engine's clock."""
    engine = with_disk(path, wait_ms=wait_ms, **options)
    engine.serve(PROMPT)
    settle(engine)
    crowd(engine)
    assert [block.ordinal for block in chain_of(engine)] == list(range(10))
    door = DiskPrefetchWait(engine.leader, engine.parts.event_publisher._config, clock=lambda: engine.now)
    return engine, door


async def held(
    engine: ScriptedEngine, door: DiskPrefetchWait, tokens: list[int] = PROMPT, **options: Any
) -> asyncio.Task[None]:
    """The request waits at the door; nothing was read yet."""
    task = asyncio.ensure_future(door.before(tokens, **options))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


def resident(engine: ScriptedEngine, tokens: list[int] = PROMPT) -> int:
    life, namespaces, _ = engine.leader.cache()
    assert life is not None
    assert life.ledger is not None
    assert namespaces is not None
    return len(life.ledger.match(namespaces.open_digest, pack_tokens(tokens), 100).path)


async def gone_at_once(
    engine: ScriptedEngine, door: DiskPrefetchWait, tokens: list[int] = PROMPT, **options: Any
) -> None:
    """The door does not hold it: nothing works on the disk meanwhile, and the deadline is far away."""
    await asyncio.wait_for(door.before(tokens, **options), 10)


async def held_and_served(engine: ScriptedEngine, door: DiskPrefetchWait) -> None:
    patient = door._wait
    door._wait = LONG
    waiting = await held(engine, door)
    settle(engine)
    await waiting
    door._wait = patient
