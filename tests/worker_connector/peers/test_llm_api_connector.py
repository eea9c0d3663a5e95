"""Counterparts of tests/integration/defs/llmapi/test_llm_api_connector.py of NVIDIA/TensorRT-LLM, under its names: what
a connector sees of a running engine. There a mock connector records the calls; here our connector is attached, and what
it makes of the calls is asserted. The table of all of them is in README.md beside this file."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dynamo_semkv.contracts.donor_events import DonorRegistered
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import Bench, engine, prompt, quiet, run, settings
from tests.worker_connector.scripted import GARBAGE, SIZE, ScriptedEngine, make
from worker_connector.engine_api.engine import SchedulerOutput
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

BOTH = pytest.mark.parametrize("manager", ["v1", "v2"])
BLOCK = 32


class Calls(Counter[str]):
    """Calls of the connector by the engine, and the outputs that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[SchedulerOutput] = []

    def spec(self, bench: Bench) -> Any:
        calls = self

        class Scheduler(SemkvConnectorScheduler):
            def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
                calls["query"] += 1
                return super().get_num_new_matched_tokens(request, num_computed_tokens)

            def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
                calls["meta"] += 1
                calls.outputs.append(scheduler_output)
                return super().build_connector_meta(scheduler_output)

            def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
                calls["request_finished"] += 1
                held = super().request_finished(request, cache_block_ids)
                calls["held"] += held
                return held

            def request_finished_by_layer_group(self, request: Any, groups: list[list[int]]) -> bool:
                calls["request_finished"] += 1
                held = super().request_finished_by_layer_group(request, groups)
                calls["held"] += held
                return held

        class Worker(SemkvConnectorWorker):
            def register_kv_caches(self, kv_cache_tensor: Any) -> None:
                calls["register_kv_caches"] += 1
                super().register_kv_caches(kv_cache_tensor)

            def register_kv_cache_layout(self, layout: Any) -> None:
                calls["register_kv_cache_layout"] += 1
                super().register_kv_cache_layout(layout)

            def start_load_kv(self, stream: Any) -> None:
                calls["start_load_kv"] += 1
                super().start_load_kv(stream)

            def wait_for_save(self, stream: Any) -> None:
                calls["wait_for_save"] += 1
                super().wait_for_save(stream)

            def get_finished(self, finished: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
                calls["get_finished"] += 1
                calls["named"] += len(finished) + len(loading)
                return super().get_finished(finished, loading)

        return bench.spec(scheduler=Scheduler, worker=Worker)


# bring-up


@pytest.mark.parametrize(("manager", "registered"), [("v1", "register_kv_caches"), ("v2", "register_kv_cache_layout")])
def test_connector_runs_on_kv_cache_manager_v2(manager: str, registered: str) -> None:
    """Neither manager falls back to the other's registration; both describe one pool of the same bytes."""
    bench, calls = Bench(settings()), Calls()
    with engine(bench, spec=calls.spec(bench), kv_cache_manager=manager):
        assert [name for name in calls if name.startswith("register")] == [registered]
        pool = bench.leader._life.pool  # type: ignore[union-attr]
        assert (pool.tokens_per_block, pool.bytes_per_block) == (BLOCK, 2 * 2 * BLOCK * 2 * 16 * 4)


# order and number of calls


@BOTH
def test_connector_simple(manager: str) -> None:
    """Eight tokens: eight batches, one question, one end. One attempt, one report; nothing is ever held or named to
    `get_finished`."""
    bench, calls = Bench(settings()), Calls()
    with engine(bench, spec=calls.spec(bench), kv_cache_manager=manager) as running:
        request_id, found = run(running, prompt(20), max_new_tokens=8)
        quiet(bench)
    assert found.stats.generated_tokens == 8
    assert {name: calls[name] for name in ("meta", "start_load_kv", "wait_for_save", "get_finished")} == dict.fromkeys(
        ("meta", "start_load_kv", "wait_for_save", "get_finished"), 8
    )
    assert (calls["query"], calls["request_finished"], calls["held"], calls["named"]) == (1, 1, 0, 0)
    assert [(len(o.new_requests), len(o.cached_requests)) for o in calls.outputs] == [(1, 0)] + [(0, 1)] * 7
    assert bench.report_of(request_id).reason is Reason.PROMPT_TOO_SHORT


@BOTH
def test_connector_scheduler_output(manager: str) -> None:
    """48 tokens of prompt and 32 generated ones: a block is saved when it is full, not when its page appears."""
    bench = Bench(settings())
    saved: list[int] = []

    class Watching(SemkvConnectorScheduler):
        def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
            metadata = super().build_connector_meta(scheduler_output)
            saved.append(sum(len(order.moves) for order in metadata.saves))  # type: ignore[union-attr]
            return metadata

    with engine(bench, spec=bench.spec(scheduler=Watching), kv_cache_manager=manager) as running:
        run(running, prompt(48), max_new_tokens=32)
        quiet(bench)
        assert [index for index, blocks in enumerate(saved) if blocks] == [0, 16]  # at 48 tokens, and with the 64th
        assert sum(saved) == bench.leader.snapshot()["ledger"]["resident"] == 2
        running.reset_prefix_cache()
        _, second = run(running, prompt(48), max_new_tokens=2)
        quiet(bench)
    assert (second.stats.device_reused_tokens, second.stats.connector_served_tokens) == (0, 32)


@BOTH
def test_connector_scheduler_output_chunked_context(manager: str) -> None:
    """V1 says all pages at once, V2 those of each chunk; what is saved, and when, is the same."""
    bench, calls = Bench(settings()), Calls()
    with engine(bench, spec=calls.spec(bench), kv_cache_manager=manager, max_num_tokens=128) as running:
        run(running, prompt(256), max_new_tokens=2)
        quiet(bench)
    reports = [(o.new_requests + o.cached_requests)[0] for o in calls.outputs[:2]]
    assert [data.computed_position for data in reports] == [0, 128]
    assert [len(data.new_block_ids) for data in reports] == ([8, 0] if manager == "v1" else [4, 4])
    assert bench.rank.counts["saved_blocks"] == 8
    assert bench.leader.snapshot()["saves"]["admitted"] == 8


@BOTH
def test_prefix_is_asked_once_and_shrinks_the_forward_pass(manager: str) -> None:
    bench, calls, tokens = Bench(settings()), Calls(), prompt(200)
    with engine(bench, spec=calls.spec(bench), kv_cache_manager=manager) as running:
        run(running, tokens)
        running.reset_prefix_cache()
        calls.clear()
        before = running.stats(0).computed_prompt_tokens
        request_id, _ = run(running, tokens)
        computed = running.stats(0).computed_prompt_tokens - before
        quiet(bench)
    assert calls["query"] == 1
    assert computed == 200 - bench.report_of(request_id).confirmed == 8


@BOTH
@pytest.mark.parametrize("offer", [64, 192])
def test_prefix_under_chunked_prefill(manager: str, offer: int) -> None:
    """Inside the first chunk and beyond it: asked once, the rest is scheduled in chunks that follow each other without
    a gap."""
    bench, calls, head, tail = Bench(settings()), Calls(), prompt(192 + 1), prompt(200, 1)
    tokens = [*head[:offer], *tail]
    with engine(bench, spec=calls.spec(bench), kv_cache_manager=manager, max_num_tokens=96) as running:
        run(running, head)
        running.reset_prefix_cache()
        calls.outputs.clear()
        calls.clear()
        request_id, found = run(running, tokens, max_new_tokens=1)
        quiet(bench)
    reports = [data for o in calls.outputs for data in o.new_requests + o.cached_requests]
    assert calls["query"] == 1
    assert found.stats.connector_served_tokens == bench.report_of(request_id).confirmed == offer
    assert reports[0].computed_position == 0
    at = offer
    for data in reports:
        assert data is reports[0] or data.computed_position == at
        at += data.num_scheduled_tokens
    assert at == len(tokens)


# windows


def test_connector_uniform_sliding_window() -> None:
    """One group, and it has a window: its tail is served; blocks that the window has passed are neither read nor
    written."""
    engine = make(windows=(8,))
    tokens = list(range(41))
    first = engine.request(tokens)
    engine.prefill(first, chunk=4)
    first.tokens.append(1)
    engine.finish(first)
    again = engine.request(tokens)
    offered = engine.prefill(again)  # every forward pass checks what its window reads
    assert offered == engine.report_of(again).confirmed == 40
    assert again.pages[0][0] == -1
    engine.finish(again)
    engine.check_balance()


@pytest.mark.parametrize("window", [6, 12])
def test_sliding_window_prefix_is_backed_by_real_pages(window: int) -> None:
    """Of a served prefix exactly the blocks that a later token still reads have pages, and exactly those are
    written."""
    engine = make(windows=(None, window))
    tokens = list(range(41))
    first = engine.request(tokens)
    engine.prefill(first, chunk=SIZE)
    first.tokens.append(1)
    engine.finish(first)
    again = engine.request(tokens)
    offered = engine.prefill(again)
    passed = max(0, (offered + 1 - window) // SIZE)
    assert [slot == -1 for slot in again.pages[1][: offered // SIZE]] == [True] * passed + [False] * (10 - passed)
    assert -1 not in again.pages[0]


def test_connector_vswa_out_of_window_blocks_reach_the_connector() -> None:
    """-1 in place, anywhere in the list: attention sinks keep the first blocks, so the hole is in the middle."""
    engine = make(windows=(None, 12))
    tokens = list(range(41))
    first = engine.request(tokens)
    engine.prefill(first, chunk=SIZE)
    first.tokens.append(1)
    engine.finish(first)
    again = engine.request(tokens)
    assert engine.ask(again) == 40
    engine.allocate(again, 0, 40, 41)
    assert again.pages[1][0] == -1
    again.pages[1][0] = engine.free[1].pop()  # a sink block
    engine.iterate((again, 1))
    (order,) = engine.metadata.loads
    pages = [move.pages[1] for move in order.moves]
    assert (pages[0] >= 0, pages[1], pages[-1] >= 0) == (True, -1, True)
    sink = [int(value) for value in engine.pools[1][pages[0], 0]]
    assert sink == [engine.value(again, position, 1, 0) for position in range(SIZE)]


def test_transfers_only_in_window_blocks_to_the_sliding_group() -> None:
    engine = make(windows=(None, 12))
    tokens = list(range(41))
    first = engine.request(tokens)
    engine.prefill(first, chunk=SIZE)
    first.tokens.append(1)
    engine.finish(first)
    strangers = [engine.free[1][index] for index in range(len(engine.free[1]))]
    again = engine.request(tokens)
    engine.prefill(again)
    held = {slot for slot in again.pages[1] if slot >= 0}
    for slot in set(strangers) - held:
        assert bool((engine.pools[1][slot] == GARBAGE).all()), f"page {slot} belongs to nobody and was written"


def test_connector_vswa_reports_page_indices_per_layer_group() -> None:
    """Several groups: the flat list is empty, and each group has slots of its own."""
    engine = make(windows=(None, None))
    engine.free[1] = engine.free[1][:-7]  # the groups' numbers differ from here on
    request = engine.request(list(range(41)))
    engine.ask(request)
    engine.allocate(request, 0, 0, 41)
    engine.schedule(request, 41)
    data = engine.output.new_requests[0]
    assert data.new_block_ids == []
    assert data.new_block_ids_by_layer_group[0] != data.new_block_ids_by_layer_group[1]
    (order,) = engine.build().saves
    assert [move.pages for move in order.moves] == list(zip(*(slots[:10] for slots in request.pages), strict=True))


# requests of other kinds


@pytest.mark.parametrize("served", [False, True])
def test_connector_disagg_prefill(served: bool) -> None:
    """A context-only request ends after its prefill: it is served and donates like any other, and holds no page
    afterwards."""
    engine = make()
    tokens = list(range(41))
    if served:
        engine.serve(tokens)
    before = len(engine.sink.events(DonorRegistered))
    request = engine.request(tokens)
    request.is_context_only_request = True  # type: ignore[attr-defined]
    assert engine.prefill(request) == (40 if served else 0)
    request.tokens.append(1)
    engine.finish(request)
    assert engine.leader.snapshot()["ledger"]["resident"] == 10
    assert len(engine.sink.events(DonorRegistered)) == before + (0 if served else 1)
    engine.check_balance()


@BOTH
def test_connector_multi_request(manager: str) -> None:
    """A pool that holds one request at a time: each frees its pages at its end, saves or not, so all of them run."""
    bench, calls = Bench(settings()), Calls()
    with engine(bench, spec=calls.spec(bench), kv_cache_manager=manager, num_blocks=3) as running:
        handles = [running.submit(prompt(70, seed), max_new_tokens=4) for seed in range(4)]
        assert {handle.result(60).finish_reason for handle in handles} == {"length"}
        quiet(bench)
        assert running.stats(0).active_blocks == 0
    assert calls["held"] == 0
    assert bench.leader.snapshot()["ledger"]["resident"] == 8


@pytest.mark.parametrize("priorities", [None, [50] * 11])
def test_connector_priorities(priorities: list[int] | None) -> None:
    """Retention priorities, set or None as on V2, change nothing: the slab has its own order of use."""
    engine = make()
    request = engine.request(list(range(41)))
    engine.ask(request)
    engine.allocate(request, 0, 0, 41)
    engine.schedule(request, 41)
    engine.output.new_requests[0].priorities = priorities
    (order,) = engine.build().saves
    assert len(order.moves) == 10


# end to end


@BOTH
def test_connector_e2e_persistent_cache(manager: str) -> None:
    """Cold: nothing matched, blocks kept. Warm: matched, and the answer is the cold one to the last token."""
    bench, tokens = Bench(settings()), prompt(150)
    with engine(bench, kv_cache_manager=manager) as running:
        cold_id, cold = run(running, tokens, max_new_tokens=40)
        running.reset_prefix_cache()
        warm_id, warm = run(running, tokens, max_new_tokens=40)
        quiet(bench)
    assert bench.report_of(cold_id).outcome is Outcome.NO_DONOR
    assert bench.report_of(warm_id).confirmed == warm.stats.connector_served_tokens == 128
    assert cold.token_ids == warm.token_ids


def test_connector_multi_pool_e2e() -> None:
    """A block's row has the bytes of every group and region, all of them different, and all come back."""
    engine = make(windows=(None, None))
    tokens = list(range(41))
    engine.serve(tokens)
    slab = engine.rank.slab
    assert slab is not None
    rows = {bytes(slab.rows[slot, : slab.bytes_per_block].numpy()) for slot in slab.sealed_slots()}
    assert len(rows) == 10
    planes = {bytes(row[at : at + 4 * SIZE]) for row in rows for at in range(0, slab.bytes_per_block, 4 * SIZE)}
    assert len(planes) == 10 * 3
    again = engine.request(tokens)
    assert engine.prefill(again) == engine.report_of(again).confirmed == 40


def test_a_scripted_engine_sees_a_page_that_nobody_wrote() -> None:
    """The tests above rest on this: a forward pass over a page without its bytes fails."""
    engine: ScriptedEngine = make()
    engine.serve(list(range(41)))
    again = engine.request(list(range(41)))
    engine.ask(again)
    engine.allocate(again, 0, 40, 41)
    engine.schedule(again, 1)
    engine.build()
    with pytest.raises(AssertionError, match="wrong KV at position 0"):
        engine.check(again, 40)
