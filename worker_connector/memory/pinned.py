"""Host memory of a slab: in huge pages where the system gives them, and pinned where a GPU reads and writes it by
itself.

Huge pages are fewer to pin and fewer to translate: of small pages, a scattered block of 16 KiB begins on one whose
address the processor no longer has in its cache. Pinned memory is registered, not taken from torch's allocator: that
one rounds up to a power of two, so that a slab of 33 GiB would take 64."""

from __future__ import annotations

import mmap
import weakref

import torch

from worker_connector.errors import Refused

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def host_rows(count: int, width: int) -> torch.Tensor:
    """uint8, shape [count, width], with all memory allocated: the first copy into a row must not wait for the kernel to
    find memory for it."""
    rows, memory = _mapped(count, width)
    try:
        memory.madvise(_POPULATE_WRITE)
    except OSError:
        rows.zero_()  # an older kernel
    return rows


def pinned_rows(count: int, width: int) -> torch.Tensor:
    """uint8, shape [count, width], pinned for as long as its memory lives. Raises Refused, with CUDA's error number, if
    it cannot be pinned."""
    rows, memory = _mapped(count, width)
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(rows.data_ptr(), count * width, _PORTABLE_AND_MAPPED))
    if error:
        raise Refused(
            "connector.slab_bytes",
            count * width,
            f"the host memory could not be pinned: CUDA error {error} of cudaHostRegister",
            "set it lower, or let the engine's process lock that much memory",
        )
    # Whoever drops the last view has waited for the copies (`Rank.close`). Memory that is unmapped while registered
    # would leave its registration to the next mapping there.
    weakref.finalize(rows.untyped_storage(), _unpin, rows.data_ptr(), memory)
    return rows


def _mapped(count: int, width: int) -> tuple[torch.Tensor, mmap.mmap]:
    """Anonymous memory, unmapped when the last view of it is gone."""
    memory = mmap.mmap(-1, count * width)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, width), memory


def _unpin(address: int, memory: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
