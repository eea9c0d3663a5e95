"""The stepped rank over a model that knows every page: it is quiet when all is right, and sees each kind of wrong
page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker_connector.reference_engine.connectors import (
    ByteStore,
    Recorder,
    recording_connector,
    storing_connector,
)
from tests.worker_connector.reference_engine.running import prompt, stepped
from worker_connector.reference_engine import ShadowModel
from worker_connector.reference_engine.engine.connector_manager import Batch

TOKENS = prompt(61, vocabulary=16)


def test_words_are_a_function_of_weights_scope_prefix_and_layer() -> None:
    words = ShadowModel().words("scope", [1, 2, 3])
    assert words.shape == (3, 2, 2, 2)
    assert len(set(words.ravel().tolist())) == words.size
    assert (ShadowModel().words("scope", [1, 2, 3, 4])[:3] == words).all()
    for other in (
        ShadowModel().words("other", [1, 2, 3]),
        ShadowModel(seed=1).words("scope", [1, 2, 3]),
        ShadowModel().words("scope", [0, 2, 3]),
    ):
        assert (other != words).all()


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_cold_reused_and_served_prompts_read_what_a_cold_prefill_writes(manager: str) -> None:
    store = ByteStore()
    engine = stepped(storing_connector(store), kv_cache_manager=manager, max_num_tokens=24)
    cold = engine.submit(TOKENS, max_new_tokens=6)
    engine.run()
    reused = engine.submit(TOKENS, max_new_tokens=6)
    engine.run()
    engine.reset_prefix_cache()
    served = engine.submit(TOKENS, max_new_tokens=6)
    engine.run()
    assert engine.faults == []
    assert engine.model.checked > 200
    outcomes = [engine.ended[request_id] for request_id in (cold, reused, served)]
    assert [outcome.token_ids for outcome in outcomes] == [outcomes[0].token_ids] * 3
    assert [outcome.stats and outcome.stats.cached_tokens for outcome in outcomes] == [0, 56, 56]
    assert store.loaded_blocks == 7


def test_a_wrong_word_in_a_loaded_page_is_seen() -> None:
    store = ByteStore()
    engine = stepped(storing_connector(store))
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()
    page = next(iter(store.pages.values()))
    page[1, 0, 5] += 1.0
    engine.submit(TOKENS)
    engine.run()
    (fault,) = engine.faults
    assert (fault.owner, fault.layer, fault.position) == (2, 1, 2)


def test_an_unwritten_page_is_seen() -> None:
    """An offer that is never loaded, which only poison or a reader that knows can tell from an old page."""
    engine = stepped(recording_connector(Recorder(offer=lambda request, computed: (16, False))))
    engine.submit(TOKENS)
    engine.run()
    assert {fault.layer for fault in engine.faults} == {0, 1}
    assert "16 positions" in engine.faults[0].what


@pytest.mark.parametrize("callback", ["start_load_kv", "wait_for_save", "get_finished"])
def test_a_write_to_a_page_of_another_request_is_seen(callback: str) -> None:
    spec = recording_connector(Recorder())
    real = getattr(spec.worker, callback)

    def scribble(self: Any, *arguments: Any) -> Any:
        engine.pool.tensor[int(engine.executor.requests[0].blocks.slots[0]), 0, 0, 0] = 7.0  # type: ignore[union-attr]
        return real(self, *arguments)

    engine = stepped(spec)
    engine.submit(TOKENS, max_new_tokens=4)
    engine.step()
    assert engine.faults == []
    setattr(spec.worker, callback, scribble)
    engine.step()
    assert [fault.slot for fault in engine.faults if "may not" in fault.what] == [
        engine.executor.requests[0].blocks.slots[0]  # type: ignore[union-attr]
    ]


def test_a_page_in_the_free_list_is_nobody_s() -> None:
    """A transfer that outlives its request."""
    store = ByteStore(load_async=True)
    engine = stepped(storing_connector(store), hold_pages_during_transfers=False)
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()
    request = engine.submit(TOKENS)
    engine.step()
    assert engine.stats().parked_requests == 1
    engine.cancel(request)
    for _ in range(4):
        engine.step()
    assert len(engine.faults) == 7


def test_parked_requests_are_loaded_at_any_time() -> None:
    store = ByteStore()
    engine = stepped(storing_connector(store))
    engine.submit(TOKENS)
    engine.run()
    engine.reset_prefix_cache()
    store.load_async = True
    engine.submit(TOKENS)
    engine.run()
    assert store.loaded_blocks == 7
    assert engine.faults == []


def test_a_fault_in_a_callback_is_raised_and_ends_the_rank() -> None:
    engine = stepped(recording_connector(Recorder(failures={"meta": KeyError("lost")})))
    request = engine.submit(TOKENS)
    with pytest.raises(KeyError, match="lost"):
        engine.step()
    assert engine.ended[request].finish_reason == "error"
    with pytest.raises(RuntimeError, match="has ended"):
        engine.step()


def test_the_probe_sees_every_stage() -> None:
    stages: list[tuple[str, int]] = []

    def probe(stage: str, batch: Batch) -> None:
        stages.append((stage, len(batch.requests)))

    engine = stepped(recording_connector(Recorder()), probe=probe)
    engine.submit(TOKENS)
    engine.step()
    assert stages == [("scheduled", 1), ("allocated", 1), ("loaded", 1), ("computed", 1), ("updated", 1), ("polled", 1)]


@pytest.mark.parametrize(
    ("tokens", "names"), [([], "1 to 512"), ([16], "vocabulary is 0 to 15"), ([1] * 512, "512 plus")]
)
def test_bad_prompts_are_refused(tokens: list[int], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        stepped(None).submit(tokens)


def test_many_requests_at_once() -> None:
    engine = stepped(storing_connector(ByteStore()), num_blocks=40)
    for seed in range(40):
        engine.submit(prompt(30, seed // 3, vocabulary=16), max_new_tokens=4)
    assert engine.run() < 100
    assert engine.faults == []
    assert len(engine.ended) == 40


def test_a_connector_is_optional() -> None:
    engine = stepped(None)
    assert (engine.scheduler, engine.worker) == (None, None)
    engine.submit(TOKENS)
    engine.run()
    assert engine.faults == []
