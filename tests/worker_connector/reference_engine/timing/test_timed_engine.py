"""The engine on a GPU's clock: its pages hold what a cold prefill writes, whatever served them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.worker_connector.harness import Bench, engine, run, settings, wait_for
from tests.worker_connector.reference_engine.connectors import Recorder, recording_connector
from tests.worker_connector.reference_engine.running import prompt, stepped
from tests.worker_connector.reference_engine.timing.test_cost_model import ROUND
from worker_connector.reference_engine import Engine, ModelSource
from worker_connector.reference_engine.models.timed_model import TimedModel
from worker_connector.reference_engine.timing.cost_model import CostModel
from worker_connector.reference_engine.timing.profile import GpuProfile

QUICK = msgspec.structs.replace(
    ROUND, flops_per_second=1e18, memory_bytes_per_second=1e18, bus_bytes_per_second=1e15, pass_overhead_seconds=1e-9
)
"""Nothing takes any time."""
TOKENS = prompt(200, vocabulary=90)


def timed(profile: GpuProfile = QUICK) -> dict[str, Any]:
    """Options of an engine."""
    model = ModelSource("timed", config=profile.page_config)
    return {"model": model, "gpu": CostModel(profile), "poison_pages": False, "tokens_per_block": 8}


def model_of(running: Engine) -> TimedModel:
    found = running.model.model
    assert isinstance(found, TimedModel)
    return found


def test_cold_reused_and_loaded_prompts_read_the_same_and_say_the_same() -> None:
    bench = Bench(settings())
    with engine(bench, **timed()) as running:
        before = model_of(running).checked
        _, cold = run(running, TOKENS, max_new_tokens=40)
        _, reused = run(running, TOKENS, max_new_tokens=40)
        wait_for(lambda: bench.leader.snapshot()["ledger"]["resident"] >= 24)
        running.reset_prefix_cache()
        _, loaded = run(running, TOKENS, max_new_tokens=40)
        assert model_of(running).faults == 0
        assert model_of(running).checked - before > 2 * 192, "prefills behind a prefix have checked it"
    assert [one.stats.cached_tokens for one in (cold, reused, loaded)] == [0, 192, 192]
    assert loaded.stats.connector_served_tokens == 192
    assert cold.token_ids == reused.token_ids == loaded.token_ids
    assert max(cold.token_ids) < 94, "printable in the byte tokenizer"


def test_another_prompt_or_tenant_continues_otherwise() -> None:
    with engine(None, **timed()) as running:
        _, one = run(running, TOKENS, max_new_tokens=20)
        _, other = run(running, [TOKENS[0] + 1, *TOKENS[1:]], max_new_tokens=20)
        _, tenant = run(running, TOKENS, max_new_tokens=20, cache_salt="b")
    assert len({tuple(each.token_ids) for each in (one, other, tenant)}) == 3


@pytest.mark.parametrize("new_tokens", [1, 200])
def test_a_wrong_page_is_counted_and_logged(new_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """By the prefill behind it, or by one of the decodes that come round to its page."""
    with engine(None, **timed(), max_num_tokens=256) as running, caplog.at_level(logging.ERROR):
        run(running, TOKENS[:193], max_new_tokens=1)
        held = running.kv_pool(0)
        held.numpy().view(np.uint32)[:, :, 0, 5] ^= 1
        run(running, TOKENS[:193] if new_tokens > 1 else TOKENS, max_new_tokens=new_tokens)
        assert model_of(running).faults > 0
    assert "do not hold what a cold prefill writes" in caplog.text


def test_a_request_waits_for_its_asynchronous_load_to_cross_the_bus() -> None:
    slow = msgspec.structs.replace(QUICK, bus_bytes_per_second=1e-3)
    for profile, arrives in ((slow, False), (QUICK, True)):
        recorder = Recorder(offer=lambda request, computed: (16, True))
        running = stepped(recording_connector(recorder), gpu=CostModel(profile), poison_pages=False)
        request = running.submit(prompt(24, vocabulary=16))
        for _ in range(20):
            running.step()
        assert (request in running.ended) is arrives
        assert running.stats().parked_requests == (0 if arrives else 1)


def test_the_model_needs_a_profile() -> None:
    with pytest.raises(ValueError, match="model 'timed' needs the config of a profile"):
        ModelSource("timed")
