"""The connector sees TensorRT-LLM's order of calls: counts, deltas, positions, parking and failures.

Named after the peer tests of TensorRT-LLM (test_llm_api_connector.py, test_connector.py) where there is one.
"""

from __future__ import annotations

import itertools
import logging
import threading

import pytest

from tests.worker_connector.reference_engine.connectors import Recorder, flat, recording_connector
from tests.worker_connector.reference_engine.running import PATIENCE_S, prompt, start, until
from worker_connector.reference_engine import TINY, EngineDeadError, RequestStats

LAYERS = TINY.num_layers


def test_connector_simple() -> None:
    recorder = Recorder()
    with start(recording_connector(recorder)) as engine:
        engine.submit(prompt(20), max_new_tokens=8).result(PATIENCE_S)
    for name in ("meta", "start_load", "wait_for_save", "get_finished"):
        assert recorder.count(name) == 8, name
    for name in ("query", "alloc", "request_finished"):
        assert recorder.count(name) == 1, name
    expected_layers = [(hook, layer) for layer in range(LAYERS) for hook in ("wait_layer", "save_layer")] * 8
    assert flat(recorder.calls, "wait_layer", "save_layer") == expected_layers
    first_iteration = recorder.names()[: recorder.names().index("get_finished") + 1]
    assert first_iteration == [
        "register",
        "wait_for_initialization",
        "query",
        "alloc",
        "meta",
        "start_load",
        *["wait_layer", "save_layer"] * LAYERS,
        "wait_for_save",
        "get_finished",
    ]
    assert recorder.names()[-3:] == ["wait_for_save", "request_finished", "get_finished"]


def test_pure_decode_skips_layer_hooks_under_graph_replay() -> None:
    recorder = Recorder()
    with start(recording_connector(recorder), layer_hooks_in_decode=False) as engine:
        engine.submit(prompt(20), max_new_tokens=4).result(PATIENCE_S)
    assert recorder.count("wait_layer") == recorder.count("save_layer") == LAYERS
    assert recorder.count("wait_for_save") == 4


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_scheduler_output(manager: str) -> None:
    """Whole prompt first, then one token a step; a new block exactly when a boundary is crossed."""
    recorder = Recorder()
    with start(recording_connector(recorder), kv_cache_manager=manager, tokens_per_block=32) as engine:
        engine.submit(prompt(48), max_new_tokens=20, cache_salt="tenant").result(PATIENCE_S)
    (first,) = recorder.outputs[0].new_requests
    assert (len(first.new_tokens), first.computed_position, first.num_scheduled_tokens) == (48, 0, 48)
    assert (len(first.new_block_ids), first.cache_salt) == (2, "tenant")
    for index, output in enumerate(recorder.outputs[1:]):
        assert not output.new_requests
        (data,) = output.cached_requests
        assert (len(data.new_tokens), data.computed_position, data.num_scheduled_tokens) == (1, 48 + index, 1)
        assert len(data.new_block_ids) == (1 if 48 + index == 64 else 0)
        assert data.new_block_ids_by_layer_group == ([data.new_block_ids] if manager == "v2" else [])


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_block_hashes_and_priorities_are_v1_s(manager: str) -> None:
    """ "RequestData fields that may not be populated" (KV Cache Connector doc): V2 reports neither."""
    recorder = Recorder()
    with start(recording_connector(recorder), kv_cache_manager=manager) as engine:
        engine.submit(prompt(20), max_new_tokens=5, retention_priority=80).result(PATIENCE_S)
        stored = [event["data"] for event in engine.poll_kv_events(0) if event["data"]["type"] == "stored"]
    hashes = [block["block_hash"] for data in stored for block in data["blocks"]]
    reports = [(output.new_requests + output.cached_requests)[0] for output in recorder.outputs]
    if manager == "v2":
        assert {(tuple(data.block_hashes), data.priorities) for data in reports} == {((), None)}
        return
    assert [data.block_hashes for data in reports] == [hashes[:2]] * 4 + [hashes]
    assert [data.priorities for data in reports] == [[80] * 3, [], [], [], []]


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_scheduler_output_chunked_context(manager: str) -> None:
    """V1 gives all blocks up front, V2 those of each chunk."""
    recorder = Recorder()
    with start(recording_connector(recorder), kv_cache_manager=manager, max_num_tokens=32) as engine:
        engine.submit(prompt(72), max_new_tokens=1).result(PATIENCE_S)
    data = [(output.new_requests + output.cached_requests)[0] for output in recorder.outputs]
    assert [d.computed_position for d in data] == [0, 32, 64]
    assert [d.num_scheduled_tokens for d in data] == [32, 32, 8]
    assert [len(d.new_tokens) for d in data] == [72, 0, 0]
    assert [len(d.new_block_ids) for d in data] == ([9, 0, 0] if manager == "v1" else [4, 4, 1])
    assert [bool(output.new_requests) for output in recorder.outputs] == [True, False, False]
    ((_, _, allocated),) = flat(recorder.calls, "alloc")
    assert allocated == data[0].new_block_ids
    assert recorder.count("query") == 1


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(
    ("offer", "chunks"),
    [
        (16, [(0, 48), (64, 8)]),  # ends inside the scheduled chunk, which shrinks
        (64, [(0, 8)]),  # up to the last block: one chunk is left
    ],
)
def test_prefix_under_chunked_prefill(manager: str, offer: int, chunks: list[tuple[int, int]]) -> None:
    """Asked once; the first report starts where the load starts; computed tokens are the prompt less the offer."""
    recorder = Recorder(offer=lambda request, computed: (offer, False))
    with start(recording_connector(recorder), kv_cache_manager=manager, poison_pages=False) as engine:
        done = engine.submit(prompt(72), max_new_tokens=1).result(PATIENCE_S)
        stats = engine.stats(0)
    data = [(output.new_requests + output.cached_requests)[0] for output in recorder.outputs]
    if manager == "v1" and offer == 16:
        chunks = [(0, 56)]  # V1's chunk keeps its size behind the prefix, so it reaches the end
    assert [(d.computed_position, d.num_scheduled_tokens) for d in data] == chunks
    assert recorder.count("query") == 1
    assert stats.computed_prompt_tokens == 72 - offer
    assert (done.stats.cached_tokens, done.stats.connector_served_tokens) == (offer, offer)


def test_offer_is_honoured_up_to_the_last_prompt_token() -> None:
    """V2 clamps an offer that covers the whole prompt to prompt_len - 1, in the middle of a block."""
    recorder = Recorder(offer=lambda request, computed: (32, False))
    with start(recording_connector(recorder), poison_pages=False) as engine:
        done = engine.submit(prompt(32), max_new_tokens=1).result(PATIENCE_S)
    (data,) = recorder.outputs[0].new_requests
    assert (data.computed_position, data.num_scheduled_tokens) == (0, 1)
    assert done.stats.cached_tokens == 31


def test_v1_asserts_that_an_offer_stays_below_the_prompt() -> None:
    recorder = Recorder(offer=lambda request, computed: (32, False))
    with start(recording_connector(recorder), kv_cache_manager="v1") as engine:
        done = engine.submit(prompt(32), max_new_tokens=1).result(PATIENCE_S)
        assert done.finish_reason == "error"
        assert "must stay below the prompt" in str(done.stats.error)


@pytest.mark.parametrize(
    ("manager", "order"),
    [("v1", ["query", "query", "query", "alloc", "alloc", "alloc"]), ("v2", ["query", "alloc"] * 3)],
)
def test_order_of_queries_and_allocations_in_a_batch(manager: str, order: list[str]) -> None:
    """V1 asks for the whole batch before the first allocation; V2 interleaves."""
    recorder = Recorder()
    gate = threading.Event()
    with start(recording_connector(recorder), kv_cache_manager=manager) as engine:
        # The first request's callback holds the engine thread until the other three are queued.
        def hold(tokens: list[int], reason: str | None, stats: RequestStats) -> None:
            assert gate.wait(PATIENCE_S)

        engine.submit(prompt(8), max_new_tokens=1, on_output=hold)
        until(lambda: recorder.count("request_finished") == 1, "the first request ends")
        recorder.calls.clear()
        handles = [engine.submit(prompt(10, seed), max_new_tokens=1) for seed in (1, 2, 3)]
        gate.set()
        for handle in handles:
            handle.result(PATIENCE_S)
    calls = flat(recorder.calls, "query", "alloc")
    assert [call[0] for call in calls] == order
    assert [call[1] for call in calls if call[0] == "alloc"] == [handle.request_id for handle in handles]


def test_async_onboard() -> None:
    """Parked out of the first batch, polled, then reported as new from the served position and not asked again."""
    recorder = Recorder(offer=lambda request, computed: (16, True), release=set())
    with start(recording_connector(recorder), poison_pages=False) as engine:
        handle = engine.submit(prompt(24), max_new_tokens=2)
        until(lambda: recorder.count("get_finished") >= 3, "the parked request is polled")
        assert (recorder.outputs[0].new_requests, recorder.outputs[0].cached_requests) == ([], [])
        assert recorder.count("start_load") == 1
        assert recorder.count("wait_for_save") == 0
        assert recorder.count("wait_layer") == 0
        started = [ids for _, _, ids in flat(recorder.calls, "get_finished")]
        assert started[0] == [handle.request_id]
        assert not any(started[1:])
        assert engine.stats(0).parked_requests == 1
        recorder.release = None
        done = handle.result(PATIENCE_S)
    (data,) = recorder.outputs[1].new_requests
    assert (data.computed_position, data.num_scheduled_tokens, len(data.new_tokens)) == (16, 8, 24)
    assert recorder.count("query") == recorder.count("alloc") == 1
    assert done.stats.connector_served_tokens == 16


def test_others_run_while_a_load_is_pending() -> None:
    recorder = Recorder(offer=lambda request, computed: (8, True) if request.prompt_len == 24 else (0, False))
    recorder.release = set()
    with start(recording_connector(recorder), poison_pages=False) as engine:
        parked = engine.submit(prompt(24), max_new_tokens=1)
        assert engine.submit(prompt(10, 1), max_new_tokens=3).result(PATIENCE_S).finish_reason == "length"
        recorder.release = None
        assert parked.result(PATIENCE_S).finish_reason == "length"


def test_async_save() -> None:
    """The response goes out at once; the pages stay until get_finished names the request."""
    recorder = Recorder(saves_async=True, release=set())
    with start(recording_connector(recorder)) as engine:
        handle = engine.submit(prompt(20), max_new_tokens=2)
        handle.result(PATIENCE_S)
        until(lambda: recorder.count("get_finished") >= 4, "the save is polled")
        named = [ids for _, ids, _ in flat(recorder.calls, "get_finished")]
        assert [ids for ids in named if ids] == [[handle.request_id]]
        assert engine.stats(0).active_blocks == 3
        recorder.release = None
        until(lambda: engine.stats(0).active_blocks == 0, "pages are freed after the save")


def test_multi_request_pages_are_freed_after_async_saves() -> None:
    recorder = Recorder(saves_async=True)
    with start(recording_connector(recorder), num_blocks=8) as engine:
        handles = [engine.submit(prompt(30, seed), max_new_tokens=2) for seed in range(6)]
        assert {handle.result(PATIENCE_S).finish_reason for handle in handles} == {"length"}
        until(lambda: engine.stats(0).active_blocks == 0, "pages are freed")


def test_a_page_wait_on_saves_ends_when_they_do() -> None:
    """All pages belong to a request that still saves: the next one waits, then runs."""
    recorder = Recorder(saves_async=True, release=set())
    with start(recording_connector(recorder), num_blocks=4) as engine:
        first = engine.submit(prompt(30), max_new_tokens=2)
        first.result(PATIENCE_S)
        second = engine.submit(prompt(30, 1), max_new_tokens=2)
        until(lambda: engine.stats(0).waiting_requests == 1, "the second waits")
        recorder.release = None
        assert second.result(PATIENCE_S).finish_reason == "length"


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_a_cancelled_request_never_sees_request_finished(phase: str) -> None:
    recorder = Recorder()
    seen = threading.Event()
    go_on = threading.Event()

    def hold(tokens: list[int], reason: str | None, stats: RequestStats) -> None:
        seen.set()
        assert go_on.wait(PATIENCE_S)

    with start(
        recording_connector(recorder), max_num_tokens=8, max_batch_size=1 if phase == "waiting" else 8
    ) as engine:
        blocker = engine.submit(prompt(8, 7), max_new_tokens=40, on_output=hold)
        assert seen.wait(PATIENCE_S)
        victim = blocker
        if phase != "decode":
            victim = engine.submit(prompt(64), max_new_tokens=4)
        victim.cancel()
        go_on.set()
        assert victim.result(PATIENCE_S).finish_reason == "cancelled"
        if victim is not blocker:
            blocker.cancel()
            blocker.result(PATIENCE_S)
        until(lambda: engine.stats(0).active_blocks == 0, "pages are freed")
    assert recorder.count("request_finished") == 0


@pytest.mark.parametrize("hold", [True, False])
def test_cancellation_during_an_async_load(hold: bool) -> None:
    """Held pages stay until the transfer ends (as under attention DP); else they are freed under the transfer."""
    recorder = Recorder(offer=lambda request, computed: (16, True), release=set())
    with start(recording_connector(recorder), hold_pages_during_transfers=hold) as engine:
        handle = engine.submit(prompt(24), max_new_tokens=2)
        until(lambda: engine.stats(0).parked_requests == 1, "the load is pending")
        handle.cancel()
        assert handle.result(PATIENCE_S).finish_reason == "cancelled"
        until(lambda: engine.stats(0).running_requests == 0, "the request left the batch")
        assert engine.stats(0).active_blocks == (3 if hold else 0)
        recorder.release = None
        until(lambda: engine.stats(0).active_blocks == 0, "pages are freed")
        recorder.offer = lambda request, computed: (0, False)
        assert engine.submit(prompt(24, 1), max_new_tokens=1).result(PATIENCE_S).finish_reason == "length"
    assert recorder.count("request_finished") == 1


@pytest.mark.parametrize("name", ["wait_layer", "save_layer", "wait_for_save"])
def test_a_fault_in_the_forward_fails_the_active_requests_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(failures={name: OSError("copy failed")})
    with start(recording_connector(recorder)) as engine:
        with caplog.at_level(logging.CRITICAL, logger="worker_connector"):
            failed = engine.submit(prompt(20), max_new_tokens=2).result(PATIENCE_S)
        assert (failed.finish_reason, failed.stats.error) == ("error", "OSError: copy failed")
        recorder.failures.clear()
        assert engine.submit(prompt(20), max_new_tokens=2).result(PATIENCE_S).stats.cached_tokens == 0
    assert recorder.count("request_finished") == 1


@pytest.mark.parametrize("name", ["query", "alloc", "meta", "start_load", "request_finished", "get_finished"])
def test_a_fault_in_any_other_callback_ends_the_engine(name: str, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(failures={name: KeyError("lost")})
    fatal: list[tuple[int, BaseException]] = []
    with start(recording_connector(recorder), lambda rank, error: fatal.append((rank, error))) as engine:
        with caplog.at_level(logging.CRITICAL, logger="worker_connector"):
            handle = engine.submit(prompt(20), max_new_tokens=1)
            done = handle.result(PATIENCE_S)
        until(lambda: bool(fatal), "on_fatal is called")
        # Only get_finished comes after the response.
        assert done.finish_reason == ("length" if name == "get_finished" else "error")
        assert [(rank, type(error)) for rank, error in fatal] == [(0, KeyError)]
        with pytest.raises(EngineDeadError):
            engine.submit(prompt(20), max_new_tokens=1)


@pytest.mark.parametrize("answer", [(0, True), (-8, False)])
def test_illegal_offers_end_the_engine(answer: tuple[int, bool], caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(offer=lambda request, computed: answer)
    with start(recording_connector(recorder)) as engine, caplog.at_level(logging.CRITICAL, logger="worker_connector"):
        assert "RuntimeError" in str(engine.submit(prompt(20), max_new_tokens=1).result(PATIENCE_S).stats.error)


def test_an_id_that_was_never_pending_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    spec = recording_connector(recorder)
    spec.worker.get_finished = lambda self, saving, loading: ([99], [])  # type: ignore[method-assign]
    with start(spec) as engine, caplog.at_level(logging.CRITICAL, logger="worker_connector"):
        engine.submit(prompt(20), max_new_tokens=2).result(PATIENCE_S)
        until(lambda: isinstance(engine.fatal_error, KeyError), "the engine ended")


def test_local_reuse_comes_first() -> None:
    recorder = Recorder()
    with start(recording_connector(recorder)) as engine:
        engine.submit(prompt(30), max_new_tokens=1).result(PATIENCE_S)
        engine.submit(prompt(30), max_new_tokens=1).result(PATIENCE_S)
    assert [call[2] for call in flat(recorder.calls, "query")] == [0, 24]
    (data,) = recorder.outputs[1].new_requests
    assert (data.computed_position, data.num_scheduled_tokens, len(data.new_block_ids)) == (24, 6, 4)


def test_idle_ranks_poll_the_connector() -> None:
    recorder = Recorder()
    with start(recording_connector(recorder), idle_poll_s=0.005):
        until(lambda: recorder.count("get_finished") >= 3, "idle polls")
    assert recorder.count("meta") == 0


def test_slots_of_a_request_never_change() -> None:
    """Deltas of all reports add up to what request_finished gets."""
    recorder = Recorder()
    with start(recording_connector(recorder), num_blocks=12) as engine:
        handles = [engine.submit(prompt(20, seed % 3), max_new_tokens=8) for seed in range(8)]
        for handle in handles:
            handle.result(PATIENCE_S)
    reported: dict[int, list[int]] = {}
    for data in itertools.chain.from_iterable(o.new_requests + o.cached_requests for o in recorder.outputs):
        reported.setdefault(data.request_id, []).extend(data.new_block_ids)
    finished = {request_id: slots for _, request_id, slots in flat(recorder.calls, "request_finished")}
    assert reported == finished


def test_attention_dp_needs_the_declaration() -> None:
    with pytest.raises(NotImplementedError, match="supports_attention_dp"):
        start(recording_connector(Recorder(), attention_dp=False), data_parallel_size=2)


def test_block_reuse_off_is_rejected() -> None:
    with pytest.raises(NotImplementedError, match="enable_block_reuse"):
        start(recording_connector(Recorder()), enable_block_reuse=False)


def test_each_attention_dp_rank_has_its_own_connector() -> None:
    recorder = Recorder()
    with start(recording_connector(recorder), data_parallel_size=2) as engine:
        for rank in (0, 1, 1):
            engine.submit(prompt(20), max_new_tokens=1, dp_rank=rank).result(PATIENCE_S)
    assert recorder.count("register") == 2
    assert [output.attention_dp_rank for output in recorder.outputs] == [0, 1, 1]
