"""Bytes between pages and slab, for every shape of pool that a layout can describe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import worker_connector.memory.transfer
from worker_connector.engine_api.engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.engine_api.pages import NO_PAGE
from worker_connector.errors import LoadFailed, Refused
from worker_connector.memory.copy_stream import Blocks, CpuStream
from worker_connector.memory.slab import HostSlab
from worker_connector.memory.transfer import Move, check_moves, copy_to_pages, copy_to_slab


def layout(
    pools: Sequence[torch.Tensor], regions: Sequence[Sequence[tuple[int, int]]], windows: Sequence[int | None] = ()
) -> KvCacheLayout:
    """One group per pool `[slots, bytes]`; `regions[g]`: (offset, size) of each region in a slot."""
    groups = []
    for index, (pool, parts) in enumerate(zip(pools, regions, strict=True)):
        found = tuple(
            KvCacheRegion(pool.data_ptr() + at, size, pool.stride(0), len(pool), (KvCacheBufferRef(index, f"r{at}"),))
            for at, size in parts
        )
        window = windows[index] if windows else None
        groups.append(KvCacheLayerGroupLayout(index, (index,), window, found))
    return KvCacheLayout(32, tuple(groups))


def random_pool(slots: int, size: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (slots, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(slots * size)
    )


POOLS = [
    # one region; two with a gap that is nobody's (block scales); a second group of another size (VSWA, MLA)
    ([(8, 64)], [[(0, 64)]]),
    ([(8, 64)], [[(0, 24), (40, 16)]]),
    ([(8, 64), (5, 24)], [[(0, 64)], [(8, 16)]]),
]


@pytest.fixture(params=["few", "many"], scope="module", autouse=True)
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways that moves are looked at: one by one, and as arrays."""
    with mock.patch.object(worker_connector.memory.transfer, "FEW", 128 if request.param == "few" else 0):
        yield


@pytest.mark.parametrize(("shapes", "regions"), POOLS)
@hypothesis_settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_was_saved_is_what_is_loaded(shapes: Any, regions: Any, data: st.DataObject) -> None:
    pools = [random_pool(*shape) for shape in shapes]
    geometry = PoolGeometry.from_layout(layout(pools, regions))
    slab = HostSlab(8, geometry.bytes_per_block)
    count = data.draw(st.integers(1, min(len(pool) for pool in pools)))
    slots = data.draw(st.permutations(range(8)))[:count]
    pages = [data.draw(st.permutations(range(len(pool))))[:count] for pool in pools]
    moves = [Move(slot, tuple(group)) for slot, group in zip(slots, zip(*pages, strict=True), strict=True)]
    check_moves(geometry, slab, moves)
    copy_to_slab(CpuStream(), geometry, slab, moves)
    before = [pool.clone() for pool in pools]
    for pool in pools:
        pool.zero_()
    copy_to_pages(CpuStream(), geometry, slab, moves)
    for group, (pool, was) in enumerate(zip(pools, before, strict=True)):
        inside = torch.zeros(pool.shape[1], dtype=torch.bool)
        for at, size in regions[group]:
            inside[at : at + size] = True
        for page in range(len(pool)):
            expected = was[page] * inside if page in pages[group] else torch.zeros_like(was[page])
            assert torch.equal(pool[page], expected)


def test_minus_one_never_reaches_memory() -> None:
    """-1 is a legal subscript: unfiltered it is the last page of the pool, which is somebody else's."""
    pools = [random_pool(6, 16), random_pool(6, 16)]
    geometry = PoolGeometry.from_layout(layout(pools, [[(0, 16)], [(0, 16)]]))
    slab = HostSlab(4, geometry.bytes_per_block)
    copy_to_slab(CpuStream(), geometry, slab, [Move(0, (0, 0)), Move(1, (1, 1)), Move(2, (2, 2))])
    was = [pool.clone() for pool in pools]
    # In group 1 page 0 follows a block without a page: -1, 0 must not be taken for neighbours.
    moves = [Move(0, (3, NO_PAGE)), Move(1, (NO_PAGE, 0)), Move(2, (4, NO_PAGE))]
    check_moves(geometry, slab, moves)
    copy_to_pages(CpuStream(), geometry, slab, moves)
    assert torch.equal(pools[0][3], was[0][0])
    assert torch.equal(pools[0][4], was[0][2])
    assert torch.equal(pools[1][0], was[1][1])
    assert torch.equal(pools[0][5], was[0][5])
    assert torch.equal(pools[1][1:], was[1][1:])


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (Move(4, (0,)), "host slot 4"),
        (Move(-1, (0,)), "host slot -1"),
        (Move(0, (6,)), "page slot 6"),
        (Move(0, (-2,)), "page slot -2"),
        (Move(0, (0, 0)), "does not have 1 page slots"),
    ],
)
def test_numbers_outside_are_refused_before_anything_is_copied(move: Move, text: str) -> None:
    geometry = PoolGeometry.from_layout(layout([random_pool(6, 16)], [[(0, 16)]]))
    with pytest.raises(LoadFailed, match=text):
        check_moves(geometry, HostSlab(4, geometry.bytes_per_block), [move])


def test_bare_tensor_and_its_layout_describe_the_same_bytes() -> None:
    pool = torch.randn(6, 2, 2, 40)
    geometry = PoolGeometry.from_tensor(pool, 8)
    assert (geometry.bytes_per_block, geometry.tokens_per_block, geometry.num_pages) == (2 * 2 * 40 * 4, 8, (6,))
    slab = HostSlab(2, geometry.bytes_per_block)
    copy_to_slab(CpuStream(), geometry, slab, [Move(1, (4,))])
    assert torch.equal(slab.rows[1, : geometry.bytes_per_block].view(torch.float32), pool[4].flatten())


def test_fingerprint_is_of_the_meaning_not_of_the_place() -> None:
    def fingerprint(slots: int = 6, size: int = 64, parts: Any = ((0, 64),), window: int | None = None) -> str:
        return PoolGeometry.from_layout(layout([random_pool(slots, size)], [parts], [window])).fingerprint

    assert fingerprint() == fingerprint(slots=9)
    others = {fingerprint(parts=((0, 32), (32, 32))), fingerprint(size=32, parts=((0, 32),)), fingerprint(window=128)}
    assert len(others | {fingerprint()}) == 4
    assert (
        PoolGeometry.from_tensor(torch.zeros(2, 2, 2, 8), 4).fingerprint
        != PoolGeometry.from_tensor(torch.zeros(2, 2, 2, 8, dtype=torch.float16), 4).fingerprint
    )


def test_layouts_that_cannot_be_described_are_refused() -> None:
    with pytest.raises(Refused, match="at least one region"):
        PoolGeometry.from_layout(KvCacheLayout(8, ()))
    with pytest.raises(Refused, match="contiguous"):
        PoolGeometry.from_tensor(torch.zeros(4, 2, 2, 8).transpose(0, 1), 4)
    with pytest.raises(Refused, match="shape"):
        PoolGeometry.from_tensor(torch.zeros(4, 2, 8), 4)


@hypothesis_settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_many_blocks_are_copied_as_one_by_one_whatever_order_they_come_in(data: st.DataObject) -> None:
    """Runs on both sides, on one, on none; rows that touch and rows with gaps between."""
    total = data.draw(st.integers(1, 40))
    numbers = [np.array(data.draw(numbers_of(total)), np.int64) for _ in range(2)]
    count = min(map(len, numbers))
    slots, pages = (side[:count] for side in numbers)
    size = 8
    widths = [data.draw(st.sampled_from([size, size + 8])) for _ in range(2)]
    rows, pool = (random_pool(total, width)[:, :size] for width in widths)
    expected_rows, expected_pool = rows.clone(), pool.clone()
    blocks = Blocks(slots, pages)
    expected_rows[slots] = pool[pages]
    CpuStream().to_rows(rows, pool, blocks)
    assert torch.equal(rows, expected_rows)
    rows.random_(0, 256, generator=torch.Generator().manual_seed(total))
    expected_pool[pages] = rows[slots]
    CpuStream().to_pages(pool, rows, blocks)
    assert torch.equal(pool, expected_pool)


def numbers_of(total: int) -> st.SearchStrategy[list[int]]:
    """Different numbers: in a row, in a few rows that follow each other in any order, backwards, in no order."""
    whole = range(total)
    rows = st.integers(1, total).flatmap(
        lambda step: st.permutations([list(whole[at : at + step]) for at in range(0, total, step)]).map(
            lambda parts: [number for part in parts for number in part]
        )
    )
    return st.one_of(st.just(list(whole)), rows, rows.map(lambda numbers: numbers[::-1]), st.permutations(whole))


@pytest.mark.parametrize("outside", [-1, 64])
@pytest.mark.parametrize("place", range(0, 64, 7))
def test_a_number_outside_is_no_copy(outside: int, place: int) -> None:
    """The rank checks before (`check_moves`); numpy alone would take the nearest row for it."""
    rows, pool = torch.zeros(64, 8, dtype=torch.uint8), random_pool(64, 8)
    scattered = np.random.default_rng(0).permutation(64)
    scattered[place] = outside
    before = pool.clone()
    with pytest.raises(IndexError):
        CpuStream().to_rows(rows, pool, Blocks(np.arange(64), scattered))
    with pytest.raises(IndexError):
        CpuStream().to_pages(pool, rows, Blocks(np.arange(64), scattered))
    assert not rows.any()
    assert torch.equal(pool, before)
