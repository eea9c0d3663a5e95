"""Layer groups with windows and sinks: which pages there are, what attention reads, and what a connector is told.

Named after TensorRT-LLM's tests (test_llm_api_connector.py, test_kv_connector_v2_prefix.py) and after the sections
"Running under VSWA" and "Blocks with no page" of its "KV Cache Connector" document.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker_connector.harness import SMALL, Bench, engine, run, settings
from tests.worker_connector.reference_engine.connectors import Recorder, recording_connector
from tests.worker_connector.reference_engine.running import Script, prompt, stepped
from worker_connector.engine_api.engine import KvCacheConnectorScheduler, KvCacheLayout, SchedulerOutput
from worker_connector.reference_engine import ConnectorSpec, LlamaConfig, SamplingParams
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.layer_groups import LayerGroup, layer_groups
from worker_connector.reference_engine.models.model import LlamaModel, RowGroup, Segment
from worker_connector.reference_engine.models.weights import random_weights

ONE_LAYER = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    max_position_embeddings=256,
)
VSWA: dict[str, Any] = {"max_attention_window": (1024, 16), "tokens_per_block": 8}


def tokens(length: int, seed: int = 0) -> list[int]:
    return prompt(length, seed, 16)


def by_group(recorder: Recorder) -> ConnectorSpec:
    """A recording connector with the complete set of per-layer-group callbacks, which also keeps the layout."""
    base = recording_connector(recorder)

    class Scheduler(KvCacheConnectorScheduler):
        supports_attention_dp = True

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            recorder.note("query", request.request_id, num_computed_tokens)
            return recorder.offer(request, num_computed_tokens)

        def update_state_after_alloc_by_layer_group(
            self, request: Any, block_ids_by_layer_group: list[list[int]]
        ) -> None:
            recorder.note("alloc", request.request_id, block_ids_by_layer_group)

        def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
            recorder.outputs.append(scheduler_output)
            return None

        def request_finished_by_layer_group(
            self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
        ) -> bool:
            recorder.note("request_finished", request.request_id, cache_block_ids_by_layer_group)
            return False

    class Worker(base.worker):  # type: ignore[misc, name-defined]
        def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
            recorder.note("layout", layout)

    return ConnectorSpec(Scheduler, Worker)


# which blocks have a page


@pytest.mark.parametrize(
    ("window", "sinks", "history", "stale"),
    [
        (None, 0, 1000, []),
        (16, 0, 15, []),
        (16, 0, 22, []),  # the next position, 22, still reads position 7
        (16, 0, 23, [0]),
        (16, 0, 31, [0, 1]),
        (16, 8, 31, [1]),
        (16, 9, 31, []),  # a sink in block 1 keeps it
        (16, 4, 47, [1, 2, 3]),
        (1, 0, 8, [0]),
    ],
)
def test_blocks_behind_the_sinks_and_in_front_of_the_window_are_stale(
    window: int | None, sinks: int, history: int, stale: list[int]
) -> None:
    group = LayerGroup(0, (0,), window, sinks)
    assert list(group.stale_blocks(history, 8)) == stale


def test_windows_repeat_over_the_layers_and_a_long_one_is_full_attention() -> None:
    groups = layer_groups(5, (512, 16, 16), sink_tokens=4, max_seq_len=512)
    assert [(group.layers, group.window, group.sink_tokens) for group in groups] == [
        ((0, 3), None, 0),
        ((1, 2, 4), 16, 4),
    ]
    assert layer_groups(2) == (LayerGroup(0, (0, 1)),)


# attention over real pages


def last_logits(group: LayerGroup, sequence: list[int], chunk: int, size: int = 4) -> torch.Tensor:
    """Prefill in chunks on fresh poisoned pages; pages of stale blocks do not exist."""
    model = LlamaModel(ONE_LAYER, random_weights(ONE_LAYER, 3))
    pool = KvPool(ONE_LAYER, 64, size, poison=True, groups=(group,))
    row: torch.Tensor | None = None
    for start in range(0, len(sequence), chunk):
        part = sequence[start : start + chunk]
        stale = group.stale_blocks(start, size)
        slots = [-1 if block in stale else 40 - block for block in range(-(-(start + len(part)) // size))]
        ((row,),) = model.forward(pool, [RowGroup((Segment(part, start, [slots]),))])
    assert row is not None
    return row


@pytest.mark.parametrize("sinks", [0, 3])
def test_attention_reads_its_window_and_the_sinks_only(sinks: int) -> None:
    """In one layer KV depends on its own token only, so what the last row depends on is what it reads."""
    group, sequence = LayerGroup(0, (0,), 6, sinks), prompt(30, 1, 64)
    reference = last_logits(group, sequence, 30)
    for position in range(30):
        changed = list(sequence)
        changed[position] = (changed[position] + 1) % 64
        read = position > 29 - 6 or position < sinks
        assert torch.allclose(last_logits(group, changed, 30), reference, atol=1e-6) != read, position


@pytest.mark.parametrize("window", [1, 5, 8, 29])
@pytest.mark.parametrize("sinks", [0, 2, 9])
def test_chunks_do_not_change_what_is_read(window: int, sinks: int) -> None:
    group, sequence = LayerGroup(0, (0,), window, sinks), prompt(30, 2, 64)
    whole = last_logits(group, sequence, 30)
    for chunk in (1, 3, 7, 16):
        torch.testing.assert_close(last_logits(group, sequence, chunk), whole, rtol=0, atol=1e-5)


def test_a_window_over_everything_is_full_attention() -> None:
    sequence = prompt(30, 2, 64)
    full = last_logits(LayerGroup(0, (0,)), sequence, 30)
    for group in (LayerGroup(0, (0,), 30), LayerGroup(0, (0,), 1, sink_tokens=30)):
        torch.testing.assert_close(last_logits(group, sequence, 7), full, rtol=0, atol=1e-5)


def test_a_block_that_is_read_and_has_no_page_is_an_error() -> None:
    model = LlamaModel(ONE_LAYER, random_weights(ONE_LAYER, 3))
    pool = KvPool(ONE_LAYER, 8, 4, groups=(LayerGroup(0, (0,), 6),))
    with pytest.raises(IndexError, match="has no page"):
        model.forward(pool, [RowGroup((Segment([1], 8, [[-1, -1, 2]]),))])
    with pytest.raises(IndexError, match="no page to be written"):
        model.forward(pool, [RowGroup((Segment([1], 8, [[0, 1, -1]]),))])


# what a connector is told


def test_register_kv_cache_layout_describes_every_group() -> None:
    recorder = Recorder()
    pool = stepped(by_group(recorder), **VSWA, sink_token_length=4).pool
    ((_, layout),) = [call for call in recorder.calls if call[0] == "layout"]
    assert [(group.layer_group_id, group.layer_ids, group.window_size) for group in layout.groups] == [
        (0, (0,), None),
        (1, (1,), 16),
    ]
    for group, pages in zip(layout.groups, pool.groups, strict=True):
        (region,) = group.regions
        assert region.base == pages.tensor.data_ptr()
        assert [(ref.layer_id, ref.role) for ref in region.buffers] == [
            (layer, role) for layer in group.layer_ids for role in ("key", "value")
        ]
    assert layout.as_single_pool_tensor() is None
    assert layout.group_of_layer(1).layer_group_id == 1


@pytest.mark.parametrize("dialect", ["M", "B"])
def test_vswa_reports_page_indices_per_layer_group(dialect: str) -> None:
    recorder = Recorder()
    engine = stepped(by_group(recorder), **VSWA, dialect=dialect, max_num_tokens=24)
    request = engine.submit(tokens(60), max_new_tokens=6)
    engine.run()
    assert engine.faults == []
    reported: list[list[int]] = [[], []]
    for output in recorder.outputs:
        (data,) = output.new_requests + output.cached_requests
        assert data.new_block_ids == []
        groups: Any = data.new_block_ids_by_layer_group
        assert isinstance(groups, dict if dialect == "B" else list)
        for group in (0, 1):
            reported[group] += groups[group]
    assert [len(slots) for slots in reported] == [9, 9]
    assert all(slot >= 0 for slots in reported for slot in slots)
    ((_, _, finished),) = [call for call in recorder.calls if call[0] == "request_finished"]
    # 65 tokens are known, and the last one was computed at 64: the window reaches back to 49, into block 6.
    assert finished == [reported[0], [-1] * 6 + reported[1][6:]]
    ((_, _, allocated),) = [call for call in recorder.calls if call[0] == "alloc"]
    assert (request, allocated) == (1, [slots[:3] for slots in reported])


@pytest.mark.parametrize(("offer", "bad"), [(8, 0), (24, 1), (48, 4)])
def test_sliding_window_prefix_is_backed_by_real_pages(offer: int, bad: int) -> None:
    """Blocks before `max(0, (offer + 1 - window) // tokens_per_block)` never exist; the others are real."""
    recorder = Recorder(offer=lambda request, computed: (offer, False))
    engine = stepped(by_group(recorder), **VSWA)
    engine.submit(tokens(60))
    engine.step()
    ((_, _, (full, windowed)),) = [call for call in recorder.calls if call[0] == "alloc"]
    assert min(full) >= 0
    assert [slot >= 0 for slot in windowed] == [False] * bad + [True] * (8 - bad)
    assert bad == max(0, (offer + 1 - 16) // 8)


def test_attention_sinks_put_the_missing_pages_in_the_middle() -> None:
    recorder = Recorder(offer=lambda request, computed: (48, False))
    engine = stepped(by_group(recorder), **VSWA, sink_token_length=9)
    engine.submit(tokens(60))
    engine.step()
    ((_, _, (_, windowed)),) = [call for call in recorder.calls if call[0] == "alloc"]
    assert [slot >= 0 for slot in windowed] == [True, True, False, False, True, True, True, True]


def test_uniform_sliding_window_stays_one_group_of_flat_lists() -> None:
    recorder = Recorder(offer=lambda request, computed: (48, False))
    engine = stepped(recording_connector(recorder), max_attention_window=(16,), tokens_per_block=8)
    engine.submit(tokens(60))
    engine.step()
    (data,) = recorder.outputs[0].new_requests
    assert data.new_block_ids_by_layer_group == [data.new_block_ids]
    assert [slot >= 0 for slot in data.new_block_ids] == [False] * 4 + [True] * 4


def test_v1_is_refused_under_windows() -> None:
    with pytest.raises(NotImplementedError, match=r"VSWA.*'v1'.*'v2'"):
        stepped(by_group(Recorder()), **VSWA, kv_cache_manager="v1")


def test_a_flat_only_scheduler_is_refused_for_several_groups() -> None:
    names = "update_state_after_alloc_by_layer_group and request_finished_by_layer_group.*2 layer groups"
    with pytest.raises(NotImplementedError, match=names):
        stepped(recording_connector(Recorder()), **VSWA)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_attention_window", (16, 0), "max_attention_window is .16, 0."),
        ("sink_token_length", -1, "sink_token_length is -1"),
    ],
)
def test_bad_windows_name_the_field(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepped(None, **{name: value})


# pages through a life


@pytest.mark.parametrize("windows", [(1024, 16), (16,), (9, 40)])
@pytest.mark.parametrize("sinks", [0, 5])
def test_cold_and_reused_prompts_read_right_pages(windows: tuple[int, ...], sinks: int) -> None:
    engine = stepped(
        None,
        max_attention_window=windows,
        sink_token_length=sinks,
        max_num_tokens=24,
        num_blocks=24,
        dice=Script(destroyed_allocation=[False] * 9 + [True]),
        destroyed_allocation_rate=1.0,
    )
    for seed in range(12):
        engine.submit(tokens(20 + 7 * seed, seed % 3), max_new_tokens=8)
        engine.step()
    engine.run()
    assert engine.faults == []
    assert engine.stats().active_blocks == 0


def test_a_prefix_whose_window_pages_are_gone_is_not_reused() -> None:
    """The tree still knows its blocks, and the full-attention group still has them."""
    engine = stepped(None, **VSWA)
    engine.submit(tokens(60))
    engine.run()
    blocks = engine.executor.blocks
    while blocks.tree.evictable(1):
        blocks._take_back(blocks.tree.evict(1))
    assert len(blocks.tree) == 7
    again = engine.submit(tokens(60))
    engine.run()
    stats = engine.ended[again].stats
    assert stats is not None
    assert stats.cached_tokens == 0
    warm = engine.submit(tokens(60))
    engine.run()
    assert engine.ended[warm].stats.cached_tokens == 56  # type: ignore[union-attr]
    assert engine.faults == []


def test_kv_events_come_once_for_each_layer_group() -> None:
    engine = stepped(None, **VSWA)
    engine.submit(tokens(17))
    engine.run()
    events = engine.poll_kv_events()
    assert [(event["data"]["type"], event["layer_group_id"], event["window_size"]) for event in events] == [
        ("created", 0, 1024),
        ("created", 1, 16),
        ("stored", 0, 1024),
        ("stored", 1, 16),
    ]
    hashes = [[block["block_hash"] for block in event["data"]["blocks"]] for event in events[2:]]
    assert hashes[0] == hashes[1]


def test_vswa_e2e_the_connector_restores_what_the_device_had() -> None:
    """Real attention in two windows: cold, warm on the device, and loaded give the same."""
    bench, sequence = Bench(settings()), prompt(200, 4, SMALL.vocab_size)
    sampling = SamplingParams(return_generation_logits=True)
    with engine(bench, max_attention_window=(4096, 96)) as running:
        _, cold = run(running, sequence, sampling=sampling)
        _, warm = run(running, sequence, sampling=sampling)
        running.reset_prefix_cache()
        request_id, loaded = run(running, sequence, sampling=sampling)
    assert (warm.stats.device_reused_tokens, loaded.stats.connector_served_tokens) == (192, 192)
    pairs = list(zip(warm.stats.generation_logits, loaded.stats.generation_logits, strict=True))
    assert all(torch.equal(left, right) for left, right in pairs)
    assert cold.token_ids == warm.token_ids == loaded.token_ids
    assert bench.report_of(request_id).confirmed == 192
