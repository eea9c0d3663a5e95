"""Host memory that the GPU reads and writes by itself.

Registered, not taken from torch's allocator of pinned memory: that one rounds up to a power of two, so that a slab of 33 GiB would take 64.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from worker_connector.refusal import Refused

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


def pinned_rows(count: int, width: int) -> torch.Tensor:
    """uint8, shape [count, width], pinned for as long as its memory lives. Refused, with CUDA's number, if it cannot be."""
    memory = mmap.mmap(-1, count * width)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin, and to look up
    rows = torch.frombuffer(memory, dtype=torch.uint8).view(count, width)
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(rows.data_ptr(), count * width, _PORTABLE_AND_MAPPED))
    if error:
        raise Refused(
            "connector.slab_bytes",
            count * width,
            f"the host memory could not be pinned: CUDA error {error} of cudaHostRegister",
            "set it lower, or let the engine's process lock that much memory",
        )
    # Whoever drops the last view has waited for the copies (`Rank.close`); unmapped while registered, it would be the next mapping's.
    weakref.finalize(rows.untyped_storage(), _unpin, rows.data_ptr(), memory)
    return rows


def _unpin(address: int, memory: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
