"""Copies of scattered rows by a handful of thread blocks, through Triton, which comes with a CUDA build of torch.

torch's own indexing kernels take all multiprocessors for as long as the bus needs, so that no compute runs beside them
(measured on an H200: no part of a copy ran beside compute, against 0.7 of a load with this kernel;
docs/performance.md)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 8
"""Thread blocks. Eight saturate PCIe 5 with rows of 64 KiB; more would take compute away and gain nothing."""
BLOCK = 4_096
"""Words of one load."""
_WARPS = 16


@triton.jit(do_not_specialize=["tiles"])  # type: ignore[untyped-decorator, unused-ignore]
def _copy_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel takes pointers and strides one by one
    target, source, target_rows, source_rows, target_step, source_step, words, tiles, per_row, BLOCK: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    step = tl.num_programs(0)
    while tile < tiles:
        row = tile // per_row
        within = (tile % per_row) * BLOCK + tl.arange(0, BLOCK)
        there = within < words
        to = tl.load(target_rows + row)
        at = tl.load(source_rows + row)
        moved = tl.load(source + at * source_step + within, mask=there)
        tl.store(target + to * target_step + within, moved, mask=there)
        tile += step


def copy_rows(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor, count: int
) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]` for i < count, on the current stream. Both are two-dimensional,
    equally wide and of one integer type, with the words of a row side by side; the indices are int64 on the same
    device, each tensor of them on a 16 byte boundary."""
    words = target.shape[1]
    per_row = -(-words // BLOCK)
    _copy_rows[(PROGRAMS,)](
        target,
        source,
        target_rows,
        source_rows,
        target.stride(0),
        source.stride(0),
        words,
        count * per_row,
        per_row,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
