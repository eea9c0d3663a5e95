"""Who speaks: generations, ranks, donor events, and the mode without a slab."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.config.schema import Materialization
from dynamo_semkv.contracts.donor_events import DonorRegistered, GenerationReset
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, RecordingSink, off_settings, settings
from tests.worker_connector.scripted import OPTIONS, SIZE, ScriptedEngine, llm_args, make
from worker_connector import connector
from worker_connector.assembly import assemble_leader_with, assemble_rank_with
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import LoadFailed
from worker_connector.leader.cache_reset import owns_cache


def test_kthena_1428_restart_is_a_new_generation() -> None:
    """volcano-sh/kthena#1428: same replica name, empty cache. Its events start at 0 with a reset, and nothing old is
    offered."""
    first, second = make(), make()
    tokens = list(range(41))
    first.serve(tokens)
    assert second.prefill(second.request(tokens)) == 0
    generations = [engine.sink.donor_events[0].data.generation for engine in (first, second)]  # type: ignore[union-attr]
    assert generations[0] != generations[1]
    assert [engine.sink.donor_events[0].event_id for engine in (first, second)] == [0, 0]
    assert first.sink.reports[0].generation == generations[0]
    assert first.sink.announcements[0].generation == generations[0]


def test_vllm_42695_weight_update_drops_what_was_saved() -> None:
    """vllm-project/vllm#42695: the engine's cache was reset, the connector's store must be too, under a new
    generation."""
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    before = engine.leader.snapshot()["generation"]
    engine.leader.reset_cache()
    assert engine.prefill(engine.request(tokens)) == 0
    assert engine.leader.snapshot()["generation"] != before
    assert len(engine.sink.events(GenerationReset)) == 2
    assert engine.leader.snapshot()["donors"] == 0


def test_lost_donor_events_are_answered_by_a_reset_and_all_donors_again() -> None:
    engine = make()
    engine.serve(list(range(41)))
    engine.serve(list(range(100, 141)))
    assert engine.sink.on_loss is not None
    engine.sink.on_loss("semantic-kv-events.engine-a.0")
    after = [event.data for event in engine.sink.donor_events][-3:]
    assert isinstance(after[0], GenerationReset)
    assert [type(event) for event in after[1:]] == [DonorRegistered, DonorRegistered]
    assert {event.provider_generation for event in after[1:]} == {after[0].generation}  # type: ignore[union-attr]
    assert engine.ask(engine.request(list(range(41)))) == 40
    engine.sink.on_loss("semkv.reports.engine-a.0")
    assert len(engine.sink.events(GenerationReset)) == 2


def test_materialization_off_registers_donors_of_the_device_tier_and_moves_nothing() -> None:
    engine = ScriptedEngine(off_settings())
    tokens = list(range(141))
    engine.serve(tokens)
    again = engine.request(tokens)
    assert engine.prefill(again) == 0
    engine.finish(again)
    (event,) = engine.sink.events(DonorRegistered)
    assert event.location.tier.value == "device"
    assert event.token_count == 140
    assert not engine.rank.counts
    assert {(r.outcome, r.reason) for r in engine.sink.reports} == {(Outcome.NO_DONOR, Reason.MATERIALIZATION_OFF)}
    assert engine.sink.announcements[0].materialization == "off"
    engine.check_balance()


def test_two_ranks_in_one_process_share_nothing() -> None:
    """llm-d-kv-cache#357: each data-parallel rank has its own cache, its own stream of events and its own reports."""
    ranks = [
        ScriptedEngine(
            settings(MIB, **OPTIONS),
            args=llm_args(SIZE, enable_attention_dp=True, tensor_parallel_size=2, attention_dp_rank=rank),
            dp_rank=rank,
        )
        for rank in (0, 1)
    ]
    tokens = list(range(41))
    ranks[0].serve(tokens)
    assert ranks[1].prefill(ranks[1].request(tokens)) == 0
    assert ranks[0].prefill(ranks[0].request(tokens)) == 40
    assert [engine.sink.reports[0].dp_rank for engine in ranks] == [0, 1]
    assert [engine.sink.donor_events[0].dp_rank for engine in ranks] == [0, 1]
    assert {subject for subject, _, _ in ranks[1].sink.messages if "reports" in subject} == {"semkv.reports.engine-a.1"}


def test_rank_that_only_the_scheduler_output_tells_is_waited_for() -> None:
    """TensorRT-LLM gives the rank to the scheduler output only; nothing may be published under a wrong one before."""
    engine = ScriptedEngine(
        settings(MIB, **OPTIONS), args=llm_args(SIZE, enable_attention_dp=True, tensor_parallel_size=4), dp_rank=3
    )
    assert not engine.sink.messages
    engine.serve(list(range(41)))
    assert {event.dp_rank for event in engine.sink.donor_events} == {3}
    assert {report.dp_rank for report in engine.sink.reports} == {3}


def test_weights_that_changed_are_another_namespace_and_nothing_old_is_offered() -> None:
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    before = engine.sink.announcements[-1]
    engine.leader.weights_changed("step-42")
    after = engine.sink.announcements[-1]
    assert (before.namespace.model, after.namespace.model) == ("scripted@1", "scripted@step-42")
    assert after.generation != before.generation
    request = engine.serve(tokens)
    assert (engine.report_of(request).offered, engine.report_of(request).generation) == (0, after.generation)
    again = engine.serve(tokens)
    assert engine.report_of(again).confirmed == 40
    assert engine.report_of(again).namespace != engine.sink.reports[0].namespace
    assert engine.leader.snapshot()["donors"] == 1
    engine.check_balance()


@pytest.mark.parametrize("options", [{}, {"materialization": Materialization.OFF}])
def test_request_that_runs_through_a_weight_update_leaves_nothing(options: dict[str, Any]) -> None:
    """Whether it was asked about, prefilled or decoding when the weights changed: whose KV it holds nobody can say."""
    engine = ScriptedEngine(settings(MIB, **OPTIONS, **options))
    asked, running, ending = (engine.request([n] * 40 + [9]) for n in range(3))
    for request in (running, ending):
        engine.prefill(request)
    engine.ask(asked)
    ending.tokens.append(1)
    engine.leader.weights_changed("step-42")
    engine.finish(ending)
    engine.allocate(asked, 0, 0, 41)
    engine.iterate((asked, 41))
    engine.decode(running, [1, 2, 3, 4])
    for request in (asked, running):
        engine.finish(request)
    assert engine.leader.snapshot()["donors"] == 0
    assert engine.leader.resident_blocks() == 0
    engine.check_balance()


def test_whoever_updates_weights_reaches_every_connector_of_the_process() -> None:
    engines = [make(), make()]
    for engine in engines:
        owns_cache(engine.leader)
        engine.serve(list(range(41)))
    assert connector.weights_changed("step-42") >= 2
    assert [engine.leader.resident_blocks() for engine in engines] == [0, 0]
    for engine in engines:
        engine.serve(list(range(41)))
    assert connector.reset_cache() >= 2
    assert [engine.leader.resident_blocks() for engine in engines] == [0, 0]
    assert {engine.sink.announcements[-1].namespace.model for engine in engines} == {"scripted@step-42"}
    with pytest.raises(ValueError, match="revision: got ' ', allowed: 1 to 256 printable"):
        connector.weights_changed(" ")


def test_weights_that_changed_before_the_pool_was_registered() -> None:
    args = llm_args(SIZE)
    sink = RecordingSink()
    leader = assemble_leader_with(args, settings(MIB, **OPTIONS), sink).leader
    leader.weights_changed("step-1")
    rank = assemble_rank_with(args, settings(MIB, **OPTIONS), inline=True)
    rank.register(PoolGeometry.from_layout(make().layout()))
    assert sink.announcements[-1].namespace.model == "scripted@step-1"


def test_offer_that_is_out_when_the_weights_change_is_not_fulfilled_from_old_blocks() -> None:
    engine = make()
    tokens = list(range(41))
    engine.serve(tokens)
    request = engine.request(tokens)
    engine.allocate(request, 0, engine.ask(request), 41)
    engine.leader.weights_changed("step-42")
    with pytest.raises(LoadFailed, match="given up"):
        engine.iterate((request, 1))
    assert engine.report_of(request).reason is Reason.GENERATION_STALE
