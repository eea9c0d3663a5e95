"""Pinned rows: registered as they are, given back before their memory goes. CUDA is a stand-in here; tests/gpu has the
real one."""

from __future__ import annotations

import gc

import pytest
import torch

from worker_connector.errors import Refused
from worker_connector.memory.pinned import pinned_rows
from worker_connector.memory.slab import HostSlab


class Runtime:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_rows_are_registered_in_the_size_that_was_asked_for(runtime: Runtime) -> None:
    slab = HostSlab(3, 5_000, pinned=True)
    assert (slab.rows.shape, slab.row_bytes) == ((3, 8_192), 8_192)
    assert runtime.registered == {slab.rows.data_ptr(): 3 * 8_192}
    slab.rows[2, 8_191] = 7
    assert int(slab.rows[2].max()) == 7


def test_memory_is_given_back_with_its_last_view(runtime: Runtime) -> None:
    rows = pinned_rows(2, 4_096)
    address, view = rows.data_ptr(), rows[1:, 8:16]
    del rows
    gc.collect()
    assert runtime.unregistered == []
    del view
    gc.collect()
    assert runtime.unregistered == [address]


def test_memory_that_cannot_be_pinned_is_refused_with_the_setting(runtime: Runtime) -> None:
    runtime.error = 2
    with pytest.raises(Refused, match=r"connector\.slab_bytes = 8192: .*CUDA error 2"):
        pinned_rows(2, 4_096)
    assert runtime.unregistered == []
