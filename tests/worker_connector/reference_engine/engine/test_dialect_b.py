"""The variant of the connector API of the Mooncake store's branch (NVIDIA/TensorRT-LLM#18676): its reports and its
hooks."""

from __future__ import annotations

import pytest

from tests.worker_connector.reference_engine.connectors import (
    Recorder,
    flat,
    recording_connector,
    with_optional_hooks,
)
from tests.worker_connector.reference_engine.running import Script, stepped
from tests.worker_connector.reference_engine.told import new_in, tokens


def test_blocks_of_a_report_are_a_dict_by_layer_group() -> None:
    recorder = Recorder()
    engine = stepped(with_optional_hooks(recorder), dialect="B")
    engine.submit(tokens(20))
    engine.run()
    (data,) = recorder.outputs[0].new_requests
    assert data.new_block_ids_by_layer_group == {0: data.new_block_ids}  # type: ignore[comparison-overlap]
    assert len(data.new_block_ids) == 3


@pytest.mark.parametrize("dialect", ["M", "B"])
def test_the_unhonoured_end_of_an_offer_is_cancelled(dialect: str) -> None:
    recorder = Recorder(offer=lambda request, computed: (32, False))
    engine = stepped(
        with_optional_hooks(recorder),
        dice=Script(failed_grow=[True]),
        failed_grow_rate=1.0,
        max_num_tokens=16,
        dialect=dialect,
    )
    request = engine.submit(tokens(72))
    engine.step()
    assert flat(recorder.calls, "cancel_load") == ([("cancel_load", request, 8, 32)] if dialect == "B" else [])


def test_the_head_of_an_offer_is_cancelled_when_the_cache_has_caught_up() -> None:
    recorder = Recorder()
    engine = stepped(with_optional_hooks(recorder), dice=Script(overtaken_offer=[True]), dialect="B")
    engine.submit(tokens(17))
    engine.run()
    recorder.offer = lambda request, computed: (32, False)
    request = engine.submit(tokens(17) + tokens(40, 1))
    engine.step()
    assert flat(recorder.calls, "query", "cancel_load")[1:] == [("query", request, 0), ("cancel_load", request, 0, 16)]
    (data,) = recorder.outputs[-1].new_requests
    assert (data.computed_position, data.num_scheduled_tokens) == (16, 25)


@pytest.mark.parametrize("dialect", ["M", "B"])
def test_request_reset_is_called_by_one_dialect_only(dialect: str) -> None:
    recorder, script = Recorder(), Script()
    engine = stepped(with_optional_hooks(recorder), dice=script, destroyed_allocation_rate=1.0, dialect=dialect)
    request = engine.submit(tokens(20), max_new_tokens=3)
    engine.step()
    script.on["destroyed_allocation"] = [True]
    engine.step()
    assert new_in(recorder) == [[request], [request]]
    assert flat(recorder.calls, "request_reset") == ([("request_reset", request)] if dialect == "B" else [])


def test_a_failed_load_restarts_its_request() -> None:
    """`take_failed_load_requests`: it leaves the batch with its saves, loses its pages and is asked about again."""
    recorder = Recorder(offer=lambda request, computed: (8 if request.prompt_len == 20 else 0, False))
    engine = stepped(with_optional_hooks(recorder), dialect="B")
    other = engine.submit(tokens(12, 1), max_new_tokens=3)
    failed = engine.submit(tokens(20))
    recorder.failed_loads = {failed}
    engine.step()
    steps = flat(recorder.calls, "start_load", "take_failed", "drop_bound_saves", "request_reset", "wait_for_save")
    assert [step[0] for step in steps] == [
        "start_load",
        "take_failed",
        "drop_bound_saves",
        "request_reset",
        "wait_for_save",
    ]
    assert steps[2][1] == [failed]
    recorder.offer = lambda request, computed: (0, False)
    engine.run()
    assert engine.faults == []
    assert new_in(recorder)[:2] == [[other, failed], [failed]]
    assert {outcome.finish_reason for outcome in engine.ended.values()} == {"length"}


def test_a_batch_of_nothing_but_failed_loads_has_no_forward_pass() -> None:
    recorder = Recorder(offer=lambda request, computed: (8, False))
    engine = stepped(with_optional_hooks(recorder), dialect="B")
    recorder.failed_loads = {engine.submit(tokens(20))}
    assert not engine.step()
    assert recorder.names()[-2:] == ["get_finished", "take_failed_async"]
    assert recorder.count("wait_for_save") == 0


def test_a_failed_parked_load_restarts_its_request() -> None:
    recorder = Recorder(offer=lambda request, computed: (8, True))
    engine = stepped(with_optional_hooks(recorder), dialect="B")
    request = engine.submit(tokens(20))
    recorder.failed_parked_loads = {request}
    engine.step()
    assert recorder.names()[-3:] == ["get_finished", "take_failed_async", "request_reset"]
    recorder.offer = lambda request, computed: (0, False)
    engine.run()
    assert recorder.count("query") == 2
    assert engine.faults == []
    assert engine.ended[request].finish_reason == "length"


def test_shutdown_hooks_are_called() -> None:
    closed = []
    spec = with_optional_hooks(Recorder())
    for part in (spec.scheduler, spec.worker):
        part.shutdown = lambda self: closed.append(type(self))  # type: ignore[attr-defined]
    stepped(spec, dialect="B").close()
    assert closed == [spec.scheduler, spec.worker]


def test_a_connector_without_the_hooks_runs_on_dialect_b() -> None:
    engine = stepped(
        recording_connector(Recorder()),
        dice=Script(destroyed_allocation=[False, True]),
        destroyed_allocation_rate=1.0,
        dialect="B",
    )
    engine.submit(tokens(20), max_new_tokens=3)
    engine.run()
    assert engine.faults == []
