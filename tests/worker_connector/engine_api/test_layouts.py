"""Layouts that TensorRT-LLM registers, and what of them reaches memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import GARBAGE, OPTIONS, SIZE, Request, ScriptedEngine, make
from worker_connector.engine_api.engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import Refused
from worker_connector.memory.copy_stream import CpuStream
from worker_connector.memory.slab import HostSlab
from worker_connector.memory.transfer import Move, copy_to_pages, copy_to_slab

TOKENS = list(range(41))


def region(pool: torch.Tensor, roles: tuple[str, ...], layers: tuple[int, ...] = (0,)) -> KvCacheRegion:
    """A pool `[slots, ...]` of any element type, all of it."""
    stride = pool.stride(0) * pool.element_size()
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers for role in roles)
    return KvCacheRegion(pool.data_ptr(), pool[0].numel() * pool.element_size(), stride, len(pool), buffers)


def one_group(*regions: KvCacheRegion, dtype: torch.dtype = torch.uint8, window: int | None = None) -> PoolGeometry:
    group = KvCacheLayerGroupLayout(0, (0,), window, regions)
    return PoolGeometry.from_layout(KvCacheLayout(SIZE, (group,), dtype))


def bits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def round_trip(geometry: PoolGeometry, pools: list[torch.Tensor]) -> None:
    """Pages 1 and 3 go to the slab and come back on 2 and 0, every byte; the others stay as they are."""
    slab = HostSlab(4, geometry.bytes_per_block)
    was = [pool.view(torch.uint8).clone() for pool in pools]
    copy_to_slab(CpuStream(), geometry, slab, [Move(0, (1,)), Move(2, (3,))])
    copy_to_pages(CpuStream(), geometry, slab, [Move(0, (2,)), Move(2, (0,))])
    for pool, before in zip(pools, was, strict=True):
        now = pool.view(torch.uint8)
        for target, source in ((2, 1), (0, 3), (1, 1), (3, 3)):
            assert torch.equal(now[target], before[source])


# element types and roles


def test_mla_has_no_value_buffer() -> None:
    latent = bits(4, 2, 1, SIZE * 18)
    geometry = one_group(region(latent.view(4, -1), ("key",), layers=(0, 1)))
    round_trip(geometry, [latent.view(4, -1)])
    assert geometry.bytes_per_block == 2 * SIZE * 18


def test_mla_as_a_bare_tensor_has_one_factor() -> None:
    pool = torch.randn(4, 2, 1, SIZE * 18)
    geometry = PoolGeometry.from_tensor(pool, SIZE)
    round_trip(geometry, [pool.view(4, -1)])
    both = PoolGeometry.from_tensor(torch.randn(4, 1, 2, SIZE * 18), SIZE)
    assert both.bytes_per_block == geometry.bytes_per_block
    assert both.fingerprint != geometry.fingerprint


def test_roles_and_layers_of_equal_bytes_are_other_layouts() -> None:
    pool = bits(4, 64)
    found = {
        one_group(region(pool, roles, layers)).fingerprint
        for roles, layers in ((("key",), (0,)), (("key", "value"), (0,)), (("key",), (0, 1)), (("index_key",), (0,)))
    }
    assert len(found) == 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_every_bit_pattern_survives(dtype: torch.dtype) -> None:
    """NaNs, infinities and negative zeros of an FP8 cache are bytes like all others."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(4, 2)
    pool = raw.view(dtype)
    round_trip(one_group(region(pool, ("key", "value")), dtype=dtype), [pool])
    tensor = raw.clone().view(dtype).view(4, 1, 2, -1)
    round_trip(PoolGeometry.from_tensor(tensor, SIZE), [tensor.view(4, -1)])


def test_nvfp4_is_packed_values_and_block_scales_in_pools_of_their_own() -> None:
    values, scales = bits(4, 128), bits(4, 16, seed=1)
    geometry = one_group(region(values, ("key", "value")), region(scales, ("key_scale", "value_scale")))
    round_trip(geometry, [values, scales])
    assert geometry.bytes_per_block == 144
    assert one_group(region(values, ("key", "value"))).fingerprint != geometry.fingerprint


def test_element_type_is_part_of_the_layout() -> None:
    pool = bits(4, 64)
    found = {one_group(region(pool, ("key",)), dtype=d).fingerprint for d in (torch.uint8, torch.float8_e4m3fn)}
    assert len(found) == 2


def test_regions_of_one_group_may_have_other_strides_and_sizes() -> None:
    wide, narrow = bits(4, 96), bits(6, 40, seed=2)
    part = KvCacheRegion(wide.data_ptr() + 8, 32, 96, 4, (KvCacheBufferRef(0, "key"),))
    geometry = one_group(part, region(narrow, ("index_key",)))
    assert geometry.num_pages == (4,)  # a page slot must be there in every region
    was = wide.clone()
    slab = HostSlab(4, geometry.bytes_per_block)
    copy_to_slab(CpuStream(), geometry, slab, [Move(0, (1,))])
    copy_to_pages(CpuStream(), geometry, slab, [Move(0, (2,))])
    assert torch.equal(wide[2, 8:40], was[1, 8:40])
    assert torch.equal(wide[2, :8], was[2, :8])
    assert torch.equal(wide[2, 40:], was[2, 40:])
    assert torch.equal(narrow[2], narrow[1])


# what a version's layout types lack


def test_region_that_cannot_make_a_tensor_is_addressed_by_its_numbers() -> None:
    pool = bits(4, 64)
    full = region(pool, ("key",))
    bare = SimpleNamespace(base=full.base, size=64, stride=64, num_slots=4, buffers=full.buffers)
    group = SimpleNamespace(layer_group_id=0, layer_ids=(0,), regions=(bare,))
    geometry = PoolGeometry.from_layout(SimpleNamespace(tokens_per_block=SIZE, groups=(group,)), device=pool.device)
    round_trip(geometry, [pool])
    assert geometry.fingerprint == one_group(full).fingerprint


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (SimpleNamespace(tokens_per_block=4), "groups"),
        (SimpleNamespace(groups=()), "tokens_per_block"),
        (SimpleNamespace(tokens_per_block=0, groups=()), "tokens_per_block"),
        (SimpleNamespace(tokens_per_block=4, groups=(SimpleNamespace(layer_group_id=0),)), "regions"),
        (
            SimpleNamespace(
                tokens_per_block=4,
                groups=(
                    SimpleNamespace(
                        layer_group_id=0,
                        layer_ids=(0,),
                        regions=(SimpleNamespace(size=8, buffers=(), as_tensor=lambda dtype: torch.zeros(4, 9)),),
                    ),
                ),
            ),
            "8 bytes",
        ),
        (
            SimpleNamespace(
                tokens_per_block=4,
                groups=tuple(
                    SimpleNamespace(
                        layer_group_id=0,
                        layer_ids=(n,),
                        regions=(SimpleNamespace(size=8, buffers=(), as_tensor=lambda dtype: bits(4, 8)),),
                    )
                    for n in range(2)
                ),
            ),
            "layer group 0 is there twice",
        ),
    ],
)
def test_unknown_layout_is_refused_with_what_is_wrong_and_a_remedy(layout: Any, text: str) -> None:
    with pytest.raises(Refused, match=rf"register_kv_cache_layout.*{text}.*Remedy: .*connector\.materialization: off"):
        PoolGeometry.from_layout(layout)


# layer groups


def test_page_slots_are_scoped_to_their_group() -> None:
    """The same number means another page in another group: each goes where its own group says."""
    engine = make(windows=(None, None), group_ids=[7, 3], by_dict=True)
    engine.free[1].reverse()  # group 3 hands its pages out from the other end
    engine.serve(TOKENS)
    again = engine.request(TOKENS)
    assert engine.prefill(again) == 40  # every byte of both groups is checked
    assert set(again.pages[0]) != set(again.pages[1])


def test_group_is_part_of_the_key() -> None:
    def fingerprint(*ids: int) -> str:
        return ScriptedEngine(settings(MIB), windows=(None,) * len(ids), group_ids=ids).rank._geometry.fingerprint  # type: ignore[union-attr]

    assert len({fingerprint(0), fingerprint(0, 1), fingerprint(1, 0), fingerprint(0, 2)}) == 4


@hypothesis_settings(max_examples=60, deadline=None)
@given(holes=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=4), flat=st.booleans())
def test_saved_are_the_blocks_up_to_the_first_that_any_group_misses(holes: set[tuple[int, int]], flat: bool) -> None:
    """-1 in any group, at any place of the list. The last page of each pool, which -1 would address, is somebody
    else's."""
    groups = 1 if flat else 3
    holes = {(0 if flat else group, ordinal) for group, ordinal in holes}
    engine = make(windows=(None,) * groups, flat=flat, num_pages=16)
    for pool in engine.pools:
        pool[-1] = 77
    first = engine.request(TOKENS)
    engine.ask(first)
    engine.free = [[page for page in free if page != 15] for free in engine.free]
    engine.allocate(first, 0, 0, 41)
    for group, ordinal in holes:
        first.pages[group][ordinal] = -1
    engine.schedule(first, 41)
    metadata = engine.build()
    engine.rank.start_load(metadata, None)
    engine.write(first, 0, 41)
    engine.rank.forward_done(metadata, None)
    first.context_current_position = 41
    engine.finish(first)
    whole = min((ordinal for _, ordinal in holes), default=10)
    again = engine.request(TOKENS)
    assert engine.ask(again) == whole * SIZE
    assert all(bool((pool[-1] == 77).all()) for pool in engine.pools)


def test_a_slab_block_is_all_groups_or_none() -> None:
    """One row holds a block in all groups, under one seal: no group can be served without the others."""
    engine = make(windows=(None, None, None))
    engine.serve(TOKENS)
    slab = engine.rank.slab
    geometry = engine.rank._geometry
    assert slab is not None
    assert geometry is not None
    entry = next(entry for entry in engine.leader._life.ledger.entries() if entry.ordinal == 2)  # type: ignore[union-attr]
    last = [plane for plane in geometry.planes if plane.group == 2][-1]
    slab.rows[entry.slot, last.offset] ^= 1
    assert engine.prefill(engine.request(TOKENS)) == 2 * SIZE


# windows


class Sinks(ScriptedEngine):
    """The first block stays live: the hole is in the middle of the list."""

    def _sinks(self, request: Request) -> None:
        for group, window in enumerate(self.windows):
            if window is not None and request.pages[group][:1] == [-1]:
                request.pages[group][0] = self.free[group].pop()
                self.pools[group][request.pages[group][0]] = GARBAGE

    def grow(self, request: Request, end: int) -> None:
        super().grow(request, end)
        if not request.reported_pages:
            self._sinks(request)


def test_attention_sinks_leave_the_hole_in_the_middle() -> None:
    engine = Sinks(settings(MIB, **OPTIONS), windows=(None, 8))
    engine.serve(TOKENS)
    again = engine.request(TOKENS)
    offered = engine.prefill(again)
    assert offered == 40
    sink = again.pages[1][0]
    assert sink >= 0
    assert again.pages[1][1] == -1
    assert again.pages[1][9] >= 0
    assert [int(v) for v in engine.pools[1][sink, 0]] == [engine.value(again, n, 1, 0) for n in range(SIZE)]


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, 20, 8)])
def test_what_the_smallest_window_has_passed_is_neither_read_nor_written(windows: tuple[int | None, ...]) -> None:
    engine = make(windows=windows)
    engine.serve(TOKENS)
    again = engine.request(TOKENS)
    offered = engine.ask(again)
    engine.allocate(again, 0, offered, 41)
    engine.schedule(again, 41 - offered)
    (order,) = engine.build().loads
    group = windows.index(8)
    written = [move.pages[group] for move in order.moves]
    assert [page == -1 for page in written] == [True] * 8 + [False] * 2
    assert engine.rank.counts["load_errors"] == 0


@pytest.mark.parametrize("windows", [(None, 8), (8,)])
def test_a_block_that_a_window_has_passed_is_never_saved_late(windows: tuple[int | None, ...]) -> None:
    """KV Cache Connector doc, "Alignment is not the same as stability": its page is somebody else's by then, and no
    report said so."""
    engine = make(windows=windows)
    first, second = engine.request(TOKENS), engine.request(TOKENS)
    for request in (first, second):
        engine.ask(request)
        engine.allocate(request, 0, 0, 8)
    engine.iterate((first, 8), (second, 8))  # the second one leaves the saving to the first
    engine.iterate((second, 8))
    engine.leader.reset(first)  # ... whose allocation is destroyed before its blocks are proven
    engine.release(first)
    other = engine.request([9] * 41)
    engine.ask(other)
    engine.allocate(other, 0, 0, 41)
    engine.iterate((second, 8), (other, 41))
    for _ in range(2):
        engine.iterate((second, 8))
    engine.iterate((second, 1))
    for request in (second, other):
        request.tokens.append(1)
        engine.finish(request)
    third = engine.request(TOKENS[:9])
    assert engine.prefill(third) == 0  # was 8, with the bytes of whoever had the pages by then
    assert engine.leader.snapshot()["saves"]["window_passed"] == 1


def test_a_late_save_without_a_window_is_still_made() -> None:
    engine = make()
    first, second = engine.request(TOKENS), engine.request(TOKENS)
    for request in (first, second):
        engine.ask(request)
        engine.allocate(request, 0, 0, 8)
    engine.iterate((first, 8), (second, 8))
    engine.iterate((second, 8))
    engine.leader.reset(first)
    engine.release(first)
    for _ in range(3):
        engine.iterate((second, 8))
    engine.iterate((second, 1))
    second.tokens.append(1)
    engine.finish(second)
    assert engine.prefill(engine.request(TOKENS)) == 40
