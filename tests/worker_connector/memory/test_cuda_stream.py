"""What the CUDA stream does with indices, words and its staging buffer, on the CPU: streams and events are names here.
The real thing is run by tests/gpu."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from worker_connector.memory import cuda_stream
from worker_connector.memory.copy_stream import Blocks, CpuStream
from worker_connector.memory.cuda_stream import CudaStream, as_words


def rows_in_turn(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor, count: int
) -> None:
    """What `row_kernel.copy_rows` does."""
    for index in range(count):
        target[target_rows[index]] = source[source_rows[index]]


class OnCpu(CudaStream):
    """Without CUDA: host memory is seen as it is, and `left` notes at each record whether the host side had changed by
    then."""

    def __init__(self, *, staging_bytes: int, kernel_below: int, own_kernel: bool = False) -> None:
        self._device = torch.device("cpu")
        self._kernel_below = kernel_below
        self._side = None  # type: ignore[assignment]
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8) if staging_bytes else None
        self._left = self  # type: ignore[assignment]
        self._kernel = rows_in_turn if own_kernel else None
        self._counting = torch.empty(0, dtype=torch.int64)
        self.watched: torch.Tensor | None = None
        self.left: list[torch.Tensor | None] = []

    def record(self, side: Any) -> None:
        self.left.append(None if self.watched is None else self.watched.clone())

    def _indices(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(blocks.slots), torch.from_numpy(blocks.pages)

    def _seen_from_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.fixture(autouse=True)
def _no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def blocks_of(*pairs: tuple[int, int]) -> Blocks:
    """(slot, page) of each."""
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Blocks(both[:, 0], both[:, 1])


def any_blocks(data: st.DataObject, slots: int, pages: int) -> Blocks:
    """Each row and page once; runs are likely."""
    pairs, slot, page = [], 0, 0
    while True:
        slot += data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        page += data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        if slot > slots or page > pages:
            break
        pairs.append((slot - 1, page - 1))
    return blocks_of(*(data.draw(st.permutations(pairs)) if data.draw(st.booleans()) else pairs))


def views(width: int, gap: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages, rows) of random bytes: strided with a gap, from an offset on."""
    generator = torch.Generator().manual_seed(width * 31 + gap * 7 + offset)
    made = [
        torch.randint(0, 256, (12, offset + width + gap), dtype=torch.uint8, generator=generator)[
            :, offset : offset + width
        ]
        for _ in range(2)
    ]
    return made[0], made[1]


@hypothesis_settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_runs_are_neighbours_on_both_sides(data: st.DataObject) -> None:
    blocks = any_blocks(data, 12, 12)
    pairs = [(slot + offset, page + offset) for slot, page, count in blocks.runs() for offset in range(count)]
    assert pairs == list(zip(blocks.slots.tolist(), blocks.pages.tolist(), strict=True))
    ends = [(slot + count, page + count) for slot, page, count in blocks.runs()]
    begins = [(slot, page) for slot, page, _ in blocks.runs()]
    assert not any(end == begin for end, begin in zip(ends, begins[1:], strict=False))
    few = Blocks(blocks.slots.tolist(), blocks.pages.tolist())
    assert list(few.runs()) == list(blocks.runs())
    assert few.starts.tolist() == blocks.starts.tolist()


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    width=st.sampled_from([8, 12, 16, 6, 7]),
    gap=st.sampled_from([0, 8, 3]),
    offset=st.sampled_from([0, 8, 2]),
    staging_bytes=st.sampled_from([0, 16, 40, 4096]),
    kernel_below=st.sampled_from([0, 1, 1000]),
    own_kernel=st.booleans(),
)
def test_same_bytes_as_the_cpu_s_stream(
    data: st.DataObject, width: int, gap: int, offset: int, staging_bytes: int, kernel_below: int, own_kernel: bool
) -> None:
    stream = OnCpu(staging_bytes=staging_bytes, kernel_below=kernel_below, own_kernel=own_kernel)
    blocks = any_blocks(data, 12, 12)
    for way in ("to_pages", "to_rows"):
        pages, rows = views(width, gap, offset)
        other_pages, other_rows = pages.clone(), rows.clone()
        if way == "to_pages":
            stream.to_pages(pages, rows, blocks)
            CpuStream().to_pages(other_pages, other_rows, blocks)
        else:
            stream.to_rows(rows, pages, blocks)
            CpuStream().to_rows(other_rows, other_pages, blocks)
        assert torch.equal(pages, other_pages)
        assert torch.equal(rows, other_rows)


@pytest.mark.parametrize(("kernel_below", "own_kernel"), [(0, False), (1000, False), (1000, True)])
def test_the_engine_waits_for_the_gathering_of_a_small_save_only(kernel_below: int, own_kernel: bool) -> None:
    """`before` waits for what was recorded last: at that time all pages had been read, and the slow way had not
    begun."""
    stream = OnCpu(staging_bytes=4096, kernel_below=kernel_below, own_kernel=own_kernel)
    pages, rows = views(16, 0, 0)
    stream.watched, before = rows, rows.clone()
    stream.to_rows(rows, pages, blocks_of((3, 1), (4, 2), (7, 9)))
    assert stream.left[-1] is not None
    assert torch.equal(stream.left[-1], before)
    assert torch.equal(rows[[3, 4, 7]], pages[[1, 2, 9]])


def test_a_save_beyond_the_buffer_holds_the_engine_until_its_last_part_is_gathered() -> None:
    stream = OnCpu(staging_bytes=32, kernel_below=1000)
    pages, rows = views(16, 0, 0)
    stream.watched, before = rows, rows.clone()
    stream.to_rows(rows, pages, blocks_of((0, 1), (2, 3), (5, 7)))
    seen = stream.left[-1]
    assert seen is not None
    assert torch.equal(seen[[0, 2]], pages[[1, 3]])
    assert torch.equal(seen[5], before[5])


def test_a_copy_that_fails_half_way_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = OnCpu(staging_bytes=4096, kernel_below=1000)
    pages, rows = views(16, 0, 0)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "index_select", fail)
    for copy in (
        lambda blocks: stream.to_pages(pages, rows, blocks),
        lambda blocks: stream.to_rows(rows, pages, blocks),
    ):
        stream.left.clear()
        with pytest.raises(RuntimeError, match="out of memory"):
            copy(blocks_of((0, 1), (2, 3)))
        assert stream.left


@pytest.mark.parametrize(
    ("width", "stride", "offset", "word"),
    [
        (16, 32, 8, torch.int64),
        (16, 32, 4, torch.int32),
        (16, 30, 0, torch.int16),
        (15, 32, 0, torch.uint8),
        (16, 32, 1, torch.uint8),
    ],
)
def test_words_are_as_wide_as_size_stride_and_place_allow(
    width: int, stride: int, offset: int, word: torch.dtype
) -> None:
    memory = torch.arange(4 * 64, dtype=torch.uint8)
    view = memory.as_strided((4, width), (stride, 1), offset)
    dtype, (found,) = as_words(view)
    assert dtype is word
    assert torch.equal(found.contiguous().view(torch.uint8), view)


def test_a_kernel_that_cannot_be_compiled_is_replaced_by_torch_s(caplog: pytest.LogCaptureFixture) -> None:
    stream = OnCpu(staging_bytes=4096, kernel_below=1000, own_kernel=True)
    pages, rows = views(16, 0, 0)
    stream.prepare(pages, rows)
    assert stream._kernel is not None

    def no_compiler(*_: Any) -> None:
        raise FileNotFoundError("no C compiler")

    stream._kernel = no_compiler
    before = pages.clone()
    stream.prepare(pages, rows)
    assert "no C compiler" in caplog.text
    assert torch.equal(pages, before)
    stream.to_pages(pages, rows, blocks_of((0, 1), (2, 3)))
    assert torch.equal(pages[[1, 3]], rows[[0, 2]])


def test_without_triton_torch_s_kernels_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "worker_connector.memory.row_kernel", raising=False)
    assert cuda_stream._row_kernel() is None


class Event:
    """A CUDA event, as far as a mark needs one. Each is reached three milliseconds after the one before."""

    made: ClassVar[list[Event]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.recorded: list[Any] = []
        self.reached = False
        self.made.append(self)

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.timing
        assert end.timing
        assert self.reached
        assert end.reached, "CUDA refuses to tell the time between events that are still to come"
        return 3.0 * (self.made.index(end) - self.made.index(self))


def test_marks_are_events_of_the_side_stream_and_their_times_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    stream = OnCpu(staging_bytes=4096, kernel_below=1000)
    stream._side = "side"  # type: ignore[assignment]
    began, ticket, ended = stream.mark(), stream.ticket(), stream.mark()
    assert [event.recorded for event in Event.made] == [["side"]] * 3
    assert [event.timing for event in Event.made] == [True, False, True]
    assert not any(one.done() for one in (began, ticket, ended))
    for event in Event.made:
        event.reached = True
    assert ended.done()
    assert ended.seconds_since(began) == pytest.approx(0.006)
