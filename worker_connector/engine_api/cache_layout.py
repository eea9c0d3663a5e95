"""KV cache layout types, in TensorRT-LLM's shape, for processes without tensorrt_llm.

Import them through `worker_connector.engine_api.engine`. Contract: "KvCacheLayout reference" and "Blocks with no page"
of TensorRT-LLM's "KV Cache Connector" document. A layout describes byte ranges that repeat once per page slot; it does
not own the memory: whoever builds one keeps the pool alive for as long as views of it are used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

#: Reported in place of a page slot for a block that has no page in a layer group.
BAD_PAGE_INDEX = -1


def valid_page_slots(page_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield `(block ordinal, page slot)` for the entries that address a page.

    -1 is a legal subscript in Python and torch, so an unfiltered list addresses the last page of the pool, which
    belongs to another request.
    """
    for ordinal, slot in enumerate(page_indices):
        if slot >= 0:
            yield ordinal, slot


@dataclass(frozen=True)
class KvCacheBufferRef:
    """One (layer, role) buffer that a region covers."""

    layer_id: int
    role: str
    expansion: int = 1


class _CudaBytes:
    """Raw device bytes as torch accepts them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


@dataclass(frozen=True)
class KvCacheRegion:
    """A contiguous byte range that repeats once per page slot, at `base + stride * slot`, `size` bytes long."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]
    #: Where `base` points; only this local form has it, because the reference pool is in host memory.
    device: str = "cpu"

    def address_of(self, slot_id: int) -> int:
        """Address of one slot. IndexError outside [0, num_slots)."""
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(f"slot_id {slot_id} is outside [0, {self.num_slots})")
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Strided view `[num_slots, size // itemsize]`. ValueError if size or stride is no multiple of itemsize."""
        itemsize = dtype.itemsize
        if self.size % itemsize or self.stride % itemsize:
            raise ValueError(f"size {self.size} and stride {self.stride} must be multiples of {dtype}'s {itemsize}")
        span = self.stride * (self.num_slots - 1) + self.size
        if self.device == "cpu":
            memory = torch.frombuffer((ctypes.c_uint8 * span).from_address(self.base), dtype=torch.uint8)
        else:
            memory = torch.as_tensor(_CudaBytes(self.base, span), device=self.device)
        return memory.view(dtype).as_strided((self.num_slots, self.size // itemsize), (self.stride // itemsize, 1))

    def slot_tensor(self, slot_id: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes of one slot. IndexError outside [0, num_slots), -1 included."""
        self.address_of(slot_id)
        return self.as_tensor(dtype)[slot_id]


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    """One layer group: the unit to which page slots are scoped."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    #: Attention window in tokens, None for full attention.
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page slot over all regions of the group."""
        return sum(region.size for region in self.regions)


@dataclass(frozen=True)
class KvCacheLayout:
    """All pools of one rank."""

    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    dtype: torch.dtype = torch.uint8

    def group(self, layer_group_id: int) -> KvCacheLayerGroupLayout:
        """KeyError if absent."""
        for group in self.groups:
            if group.layer_group_id == layer_group_id:
                return group
        raise KeyError(f"no layer group {layer_group_id}")

    def group_of_layer(self, layer_id: int) -> KvCacheLayerGroupLayout:
        """The group that owns a model layer. KeyError if none does."""
        for group in self.groups:
            if layer_id in group.layer_ids:
                return group
        raise KeyError(f"no layer group holds layer {layer_id}")

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        """`[num_slots, num_layers, kv_factor, block_size]` of `dtype`, or None where no such view exists."""
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        region = self.groups[0].regions[0]
        layers = sorted(self.groups[0].layer_ids)
        if not layers or len(region.buffers) % len(layers):
            return None
        kv_factor = len(region.buffers) // len(layers)
        in_order = [ref.layer_id for ref in region.buffers] == [layer for layer in layers for _ in range(kv_factor)]
        elements, rest = divmod(region.size, self.dtype.itemsize)
        if kv_factor == 0 or not in_order or rest or elements % len(region.buffers):
            return None
        view = region.as_tensor(self.dtype)
        return view.view(region.num_slots, len(layers), kv_factor, elements // len(region.buffers))
