"""One schedule: what a tape says that the engine's clients, the clock and the memory do, and when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.worker_connector.harness import Bench
from tests.worker_connector.schedules.tape import Tape
from tests.worker_connector.schedules.world import SCOPES, SIZE, Attach, World
from worker_connector.reference_engine import Behaviours

MAX_RUNNING = 5
RARE = 0.15
FULL = 1024
"""A window that no sequence outgrows."""


def run_schedule(data: bytes, attach: Attach = Bench.spec) -> Counter[str]:
    """Counts of what it met. Raises `Broken`, or whatever a callback of the connector let escape."""
    tape = Tape(data)
    world = _world(tape, attach)
    try:
        while not tape.is_used_up:
            _act(tape, world)
        world.check_end()
        return world.seen
    finally:
        world.engine.close()


def _world(tape: Tape, attach: Attach) -> World:
    shape, parks, rare, trim, more = (tape.below("shape", 256) for _ in range(5))
    manager = ("v2", "v1")[shape & 1]
    dialect = "B" if manager == "v2" and parks >> 2 & 1 else "M"
    behaviours = Behaviours(
        dialect=dialect,
        overtaken_offer_rate=RARE if dialect == "B" else 0.0,
        overlap_scheduling=bool(rare & 1),
        dropped_batch_rate=RARE * (rare >> 1 & 1),
        failed_grow_rate=2 * RARE * (rare >> 2 & 1) if manager == "v2" else 0.0,
        destroyed_allocation_rate=RARE / 4 * (rare >> 3 & 1),
        lost_finish_rate=RARE * (rare >> 4 & 1),
        dropped_batch_reverts=bool(more >> 3 & 1),
        dummy_rate=2 * RARE * (more & 1),
        warmup_forwards=rare >> 5 & 1,
        token_budget_trim=("off", "off", "shrink", "defer")[trim & 3],
        trim_rate=2 * RARE,
        report_before_trim=trim >> 2 & 3 == 3,
    )
    return World(
        tape,
        attach,
        kv_cache_manager=manager,
        num_blocks=(48, 24, 16, 12)[shape >> 1 & 3],
        max_num_tokens=(64, 24, 12, 8)[shape >> 3 & 3],
        slots=(16, 40, 8, 5)[shape >> 5 & 3],
        max_leases=(3, 1)[shape >> 7 & 1],
        async_load_min_tokens=(None, None, SIZE, 3 * SIZE)[parks & 3] if manager == "v2" else None,
        max_attention_window=((), (), (FULL, 6), (FULL, 11))[trim >> 4 & 3] if manager == "v2" else (),
        sink_token_length=SIZE * (trim >> 6 & 1),
        enable_partial_reuse=more >> 1 & 3 == 3,
        data_parallel_size=1 + (more & 1),
        behaviours=behaviours,
        failed_copy_rate=RARE * (parks >> 3 & 1),
    )


def _act(tape: Tape, world: World) -> None:
    act = tape.below("act", 32)
    world.now += 0.5
    if act < 10:
        world.copy()
        world.step()
    elif act < 13:
        for _ in range(3):
            world.step()
    elif act < 23:
        _submit(tape, world)
    elif act == 23:
        world.copy()
    elif act < 26:
        if world.engine.running:
            running = sorted(world.engine.running)
            world.cancel(running[tape.below("which", len(running))])
    elif act < 30:
        world.engine.reset_prefix_cache()
    elif act == 30:
        world.damage(tape.below("slot", 40), tape.below("byte", 256))
    elif tape.below("long", 3):
        world.pass_time()
    else:
        world.update_weights()


def _submit(tape: Tape, world: World) -> None:
    """A prompt over few words, so that prefixes are shared; or what follows an earlier one; once or twice."""
    if len(world.engine.running) >= MAX_RUNNING:
        world.step()
        return
    kind = tape.below("kind", 8)
    scope = max(0, tape.below("scope", 4 * len(SCOPES)) - 3 * len(SCOPES))
    earlier = [request_id for request_id in world.engine.ended if world.engine.ended[request_id].token_ids]
    if kind >= 6 and earlier:
        request_id = earlier[tape.below("which", len(earlier))]
        prompt, of = world.submitted[request_id]
        tokens = [*prompt, *world.engine.ended[request_id].token_ids, *[3] * tape.below("turn", 6)][:32]
        scope = SCOPES.index(of)
    else:
        words = [tape.below("word", 4) // 3 for _ in range(1 + tape.below("blocks", 6))]
        tokens = [word for word in words for _ in range(SIZE)] + [2] * tape.below("rest", SIZE)
    new_tokens = 1 + tape.below("new", 7)
    for _ in range(2 if kind == 5 else 1):
        world.submit(tokens, new_tokens, scope)


def random_tape(dice: random.Random) -> bytes:
    return bytes(dice.randrange(256) for _ in range(dice.randrange(64, 176)))


def shorter(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """A tape that fails as well, with less in it: its end cut off, stretches left out, bytes made 0."""
    for size in (64, 16, 4, 1):
        at = len(data)
        while at > 0:
            at -= size
            start = max(at, 0)
            for candidate in (
                data[:start] + data[at + size :],
                data[:start] + bytes(at + size - start) + data[at + size :],
            ):
                if candidate != data and fails(candidate):
                    data = candidate
                    break
    return data
