"""Who speaks: generations, ranks, donor events, and the mode without a slab."""

from __future__ import annotations

from dynamo_semkv.contracts.donor_events import DonorRegistered, GenerationReset
from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, off_settings, settings
from tests.worker_connector.scripted import OPTIONS, SIZE, ScriptedEngine, llm_args, make


def test_kthena_1428_restart_is_a_new_generation() -> None:
    """volcano-sh/kthena#1428: same replica name, empty cache. Its events start at 0 with a reset, and nothing old is offered."""
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
    """vllm-project/vllm#42695: the engine's cache was reset, the connector's store must be too, under a new generation."""
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
