"""Counterparts of the unit tests of the Mooncake store connector (NVIDIA/TensorRT-LLM#18676), under their names:
another connector with the same duties. Where ours does a thing in another way, the test says what must hold all the
same. The table is in README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dynamo_semkv.contracts.report import Reason
from tests.worker_connector.scripted import SIZE, Request, ScriptedEngine, make

TOKENS = list(range(24))
"""Six blocks."""


def started(engine: ScriptedEngine, request: Request, scheduled: int, honoured: int = 0) -> Any:
    """Metadata of the request's first batch."""
    engine.allocate(request, 0, honoured, honoured + scheduled)
    engine.schedule(request, scheduled)
    return engine.build()


def ordinals(request: Request, orders: Sequence[Any]) -> list[int]:
    """Blocks of the request that these orders name, by their pages."""
    return [request.pages[0].index(move.pages[0]) for order in orders for move in order.moves]


# the store's side


def test_worker_prefix_hit_needs_every_layer_group() -> None:
    """A block that one group could not give is in no group's store: the match ends before it."""
    engine = make(windows=(None, None))
    request = engine.request(TOKENS)
    engine.ask(request)
    engine.allocate(request, 0, 0, 24)
    real, request.pages[1][3] = request.pages[1][3], -1
    assert saved_blocks(engine, request) == 3
    request.pages[1][3] = real
    request.tokens.append(1)
    engine.finish(request)
    assert engine.ask(engine.request(TOKENS)) == 3 * SIZE


def saved_blocks(engine: ScriptedEngine, request: Request) -> int:
    engine.schedule(request, 24)
    metadata = engine.build()
    engine.rank.start_load(metadata, None)
    engine.rank.forward_done(metadata, None)
    return sum(len(order.moves) for order in metadata.saves)


@pytest.mark.parametrize("gap", [0, 2, 4])
def test_worker_prefix_hit_stops_at_the_first_gap(gap: int) -> None:
    engine = make()
    engine.serve(TOKENS)
    life = engine.leader._life
    assert life is not None
    assert life.ledger is not None
    entry = next(entry for entry in life.ledger.entries() if entry.ordinal == gap)
    life.damaged(entry.slot, loaded=False)
    assert engine.ask(engine.request(TOKENS)) == gap * SIZE


# what is offered, loaded and saved


def test_scheduler_never_offers_the_whole_prompt() -> None:
    engine = make()
    engine.serve([*TOKENS, 1, 2])
    assert [engine.ask(engine.request(TOKENS[:n])) for n in (24, 23, 21, 20, 4, 1)] == [20, 20, 20, 16, 0, 0]


def test_scheduler_declines_partial_local_matches() -> None:
    engine = make()
    engine.serve(TOKENS)
    assert [engine.ask(engine.request(TOKENS), n) for n in (0, 1, 5, 4, 19)] == [20, 0, 0, 16, 0]


def test_scheduler_skips_local_prefix_when_looking_up() -> None:
    """What the engine holds is not offered again, and not loaded."""
    engine = make()
    engine.serve(TOKENS)
    again = engine.request(TOKENS)
    assert engine.ask(again, 8) == 12
    engine.allocate(again, 8, 12, 24)
    engine.schedule(again, 4)
    assert ordinals(again, engine.build().loads) == [2, 3, 4]


def test_scheduler_builds_loads_for_the_offered_blocks() -> None:
    """And saves only the rest: what came from the slab is there."""
    engine = make()
    engine.serve(TOKENS[:9])
    again = engine.request(TOKENS)
    assert engine.ask(again) == 8
    metadata = started(engine, again, 16, honoured=8)
    assert ordinals(again, metadata.loads) == [0, 1]
    assert ordinals(again, metadata.saves) == [2, 3, 4, 5]


def test_scheduler_does_not_resave_blocks_across_iterations() -> None:
    engine = make()
    request = engine.request(TOKENS[:8])
    engine.ask(request)
    assert ordinals(request, started(engine, request, 8).saves) == [0, 1]
    engine.rank.forward_done(engine.metadata, None)
    engine.write(request, 0, 8)
    request.context_current_position = 8
    saved: list[list[int]] = []
    for token in range(50, 55):
        engine.decode(request, [token])
        saved.append(ordinals(request, engine.metadata.saves))
    assert saved == [[], [], [], [2], []]


def test_scheduler_waits_for_a_block_to_fill_before_saving() -> None:
    engine = make()
    request = engine.request(TOKENS[:5])
    engine.ask(request)
    assert ordinals(request, started(engine, request, 5).saves) == [0]


def test_scheduler_skips_blocks_without_a_page_in_every_group() -> None:
    engine = make(windows=(None, None))
    request = engine.request(TOKENS[:8])
    engine.ask(request)
    engine.allocate(request, 0, 0, 8)
    request.pages[1][1] = -1
    engine.schedule(request, 8)
    (order,) = engine.build().saves
    assert [move.pages for move in order.moves] == [(request.pages[0][0], request.pages[1][0])]


# the end of a request


def test_scheduler_request_finished_pins_pages_only_when_saving() -> None:
    """Ours never pins: saves read the pages in stream order, before whoever gets them next writes. A second end of it
    is no fault."""
    engine = make()
    request = engine.request(TOKENS)
    engine.prefill(request)
    request.tokens.append(1)
    engine.leader.finished(request)
    engine.leader.finished(request)
    engine.release(request)
    engine.serve(range(100, 124))  # on those pages
    assert engine.prefill(engine.request(TOKENS)) == 20
    engine.idle()


def test_scheduler_request_finished_is_false_without_saves() -> None:
    """Less than a block: nothing saved, nothing kept, no donor."""
    engine = make()
    request = engine.request(TOKENS[:3])
    engine.prefill(request)
    engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == engine.leader.snapshot()["donors"] == 0
    engine.check_balance()


def test_scheduler_saves_a_replayed_request_from_its_new_pages() -> None:
    engine = make()
    request = engine.request(TOKENS)
    engine.ask(request)
    first = ordinals(request, started(engine, request, 24).saves)
    old = list(request.pages[0])
    engine.free[0][:0] = [engine.free[0].pop()]  # the replay gets other pages
    engine.restart(request)
    engine.ask(request)
    engine.free[0].reverse()
    again = started(engine, request, 24)
    assert first == ordinals(request, again.saves) == list(range(6))
    assert not set(old) & {move.pages[0] for order in again.saves for move in order.moves}


# isolation


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"lora_task_id": 1}),
        ({"lora_task_id": 1}, {"lora_task_id": 2}),
        ({"multimodal_hashes": [[1] * 8]}, {"multimodal_hashes": [[1] * 7 + [2]]}),
        ({}, {"multimodal_hashes": [[1] * 8]}),
    ],
)
def test_scheduler_isolates_requests_by_cache_salt(one: dict[str, Any], other: dict[str, Any]) -> None:
    """... by LoRA adapter and by multimodal content: same tokens, other keys; the same again is served."""
    engine = make()
    engine.serve(TOKENS, **one)
    assert engine.prefill(engine.request(TOKENS, **other)) == 0
    assert engine.prefill(engine.request(TOKENS, **one)) == 20


@pytest.mark.parametrize("positions", [[4], [4, 12]])
def test_scheduler_bypasses_multimodal_requests_it_cannot_identify(positions: list[int]) -> None:
    """Media without a hash each: no look-up, no save, no donor."""
    engine = make()
    engine.serve(TOKENS)
    request = engine.request(TOKENS, multimodal_hashes=[[1] * 8] * (len(positions) - 1))
    request.multimodal_positions = positions  # type: ignore[attr-defined]
    assert engine.ask(request) == 0
    metadata = started(engine, request, 24)
    assert (metadata.loads, metadata.saves) == ((), ())
    request.tokens.append(1)
    engine.finish(request)
    assert engine.report_of(request).reason is Reason.MULTIMODAL_UNHASHED
    assert engine.leader.snapshot()["donors"] == 1


# offers that are cut


@pytest.mark.parametrize(
    ("cuts", "local", "end", "expected"),
    [
        ([(4, 8)], 8, 20, [2, 3, 4]),
        ([(4, 12)], 12, 20, [3, 4]),
        ([(4, 8), (16, 20)], 8, 16, [2, 3]),
        ([(16, 20), (4, 8)], 8, 16, [2, 3]),
        ([(4, 20)], 4, 4, []),
        ([(0, 24)], 4, 4, []),
        ([(0, 4), (20, 24)], 4, 20, [1, 2, 3, 4]),
        ([(8, 8)], 4, 20, [1, 2, 3, 4]),
        (
            [(19, 24)],
            4,
            19,
            [1, 2, 3, 4],
        ),  # theirs leaves the cut block out; an engine that takes 19 tokens reads three of it
    ],
)
@pytest.mark.parametrize("says_position", [True, False])
def test_scheduler_cancel_load_preserves_uncanceled_range(
    cuts: list[tuple[int, int]], local: int, end: int, expected: list[int], says_position: bool
) -> None:
    """An offer of the tokens [4, 20) is cut at either end; `local` and `end` is what the engine then holds and takes. A
    version that says where its forward pass starts, and one that says it by `cancel_load` only."""
    engine = make()
    engine.serve(TOKENS)
    again = engine.request([*TOKENS[:20], *range(60, 70)])
    assert engine.ask(again, 4) == 16
    for start, stop in cuts:
        engine.leader.cancelled(again, start, stop)
    engine.allocate(again, 4, end - 4, end + 4)
    again.external = end - local
    engine.write(again, 0, local)
    attempt = engine.leader._life.attempts.get(again.request_id)  # type: ignore[union-attr]
    assert attempt is not None
    assert attempt.plan is not None
    if not says_position:
        attempt.position = attempt.plan.position = None
    engine.iterate((again, 4))
    assert ordinals(again, engine.metadata.loads) == expected
    engine.iterate((again, 4))
    assert engine.metadata.loads == ()  # consumed once


def test_scheduler_rejects_cancellation_that_splits_an_offer() -> None:
    """A cut out of the middle is none that a runtime makes; the hook may not raise, and the engine's own word on where
    it starts counts."""
    engine = make()
    engine.serve(TOKENS)
    again = engine.request(TOKENS)
    assert engine.ask(again) == 20
    engine.leader.cancelled(again, 4, 8)
    engine.allocate(again, 0, 20, 24)
    engine.iterate((again, 4))
    assert engine.report_of(again).confirmed == 20
