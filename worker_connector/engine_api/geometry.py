"""The registered KV pool as byte planes, and what a block of it looks like in host memory.

A *block* is one block ordinal in all layer groups. In the slab its bytes are the regions of all groups one after the
other, in the order in which they were registered. Regions are copied whole as bytes: a region may hold keys, values,
block scales or what a future model needs, so nothing here knows "K and V" (KV Cache Connector doc, "KvCacheLayout
reference").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from worker_connector.engine_api.cache_layout import KvCacheRegion
from worker_connector.errors import Refused

FINGERPRINT_SCHEMA = "semkv-layout-1"


@dataclass(frozen=True)
class Plane:
    """One region of one layer group."""

    group: int
    """Index into `PoolGeometry.group_ids`, not the id itself."""
    offset: int
    """First byte of the region inside a block in the slab."""
    size: int
    pages: torch.Tensor
    """uint8, shape [num_slots, size], rows strided as in the pool: a view of the engine's memory."""
    layers: tuple[int, ...] = ()
    """Ids of the model layers whose bytes it holds, ascending."""
    regular: bool = False
    """Its layers lie one after the other, in the order of `layers`, equally large."""


@dataclass(frozen=True)
class PoolGeometry:
    """Pools of one rank. `windows[g]`: attention window of group g in tokens, None for full attention."""

    tokens_per_block: int
    group_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    planes: tuple[Plane, ...]
    bytes_per_block: int
    dtype: str
    fingerprint: str
    """16 hex digits over what decides the meaning of a block's bytes: groups, layers, regions, roles, sizes, element
    type, tokens per block. Not over addresses, strides or the number of pages: two engines with different pool sizes
    share one layout."""
    block_size_configured: bool = False
    """The pool does not say how many tokens a block has; `tokens_per_block` comes from the engine's settings, which may
    be stale."""

    @cached_property
    def num_pages(self) -> tuple[int, ...]:
        """Page slots per group: the smallest over its regions."""
        return tuple(
            min(plane.pages.shape[0] for plane in self.planes if plane.group == group)
            for group in range(len(self.group_ids))
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of all layers, ascending; empty when some plane does not say whose bytes it holds."""
        if not all(plane.layers for plane in self.planes):
            return ()
        return tuple(sorted({layer for plane in self.planes for layer in plane.layers}))

    @cached_property
    def by_layer(self) -> tuple[Plane, ...]:
        """The same bytes as `planes`, in slices that hold one layer each where a plane's bytes are that regular, in the
        order in which a forward pass reaches them."""
        slices = [part for plane in self.planes for part in _slices(plane)]
        return tuple(sorted(slices, key=lambda part: part.layers[:1]))

    @property
    def device(self) -> torch.device:
        """The device of the first plane's pages."""
        return self.planes[0].pages.device

    @classmethod
    def from_layout(cls, layout: Any, device: torch.device | None = None) -> PoolGeometry:
        """From `register_kv_cache_layout`; versions of its types differ, so everything is read by name. `device`: where
        the pools are, for regions that cannot make a tensor themselves (None: the current CUDA device, or the CPU
        without one). Raises Refused, with what is wrong, where it does not describe groups of regions of bytes."""
        tokens_per_block = getattr(layout, "tokens_per_block", None)
        if not isinstance(tokens_per_block, int) or tokens_per_block < 1:
            raise _unknown(f"tokens_per_block = {tokens_per_block!r}", "it must be a whole number of tokens")
        groups = getattr(layout, "groups", None)
        if groups is None:
            raise _unknown(type(layout).__name__, "it has no groups")
        planes: list[Plane] = []
        offset = 0
        marks: list[str] = []
        ids: list[int] = []
        for index, group in enumerate(groups):
            window = getattr(group, "window_size", None)
            if int(group.layer_group_id) in ids:
                raise _unknown(f"{len(groups)} groups", f"layer group {group.layer_group_id} is there twice")
            ids.append(int(group.layer_group_id))
            found = _regions(group)
            marks.append(f"group {group.layer_group_id} window {window} layers {','.join(map(str, group.layer_ids))}")
            for region in found:
                planes.append(Plane(index, offset, region.size, _pages(region, device), *_layers_of(region.buffers)))
                offset += region.size
                buffers = (f"{b.layer_id}/{b.role}/{getattr(b, 'expansion', 1)}" for b in region.buffers)
                marks.append(f"region {region.size} {','.join(buffers)}")
        if not planes or {plane.group for plane in planes} != set(range(len(ids))):
            raise _unknown(f"{len(ids)} groups, {len(planes)} regions", "every layer group needs at least one region")
        dtype = _dtype_name(getattr(layout, "dtype", torch.uint8))
        return cls(
            tokens_per_block=tokens_per_block,
            group_ids=tuple(ids),
            windows=tuple(getattr(group, "window_size", None) for group in groups),
            planes=tuple(planes),
            bytes_per_block=offset,
            dtype=dtype,
            fingerprint=_fingerprint(tokens_per_block, dtype, marks),
        )

    @classmethod
    def from_tensor(cls, pool: torch.Tensor, tokens_per_block: int) -> PoolGeometry:
        """From `register_kv_caches`: `[num_blocks, num_layers, kv_factor, block_size]`, row i is page slot i."""
        if pool.dim() != 4 or not pool.is_contiguous():
            raise Refused(
                "register_kv_caches",
                f"shape {tuple(pool.shape)}, contiguous {pool.is_contiguous()}",
                "expected a contiguous [num_blocks, num_layers, kv_factor, block_size] tensor",
                "use a single-pool KV cache, or one that registers a KvCacheLayout",
            )
        blocks, layers, kv_factor, block_size = pool.shape
        pages = pool.view(blocks, -1).view(torch.uint8)
        dtype = _dtype_name(pool.dtype)
        marks = [f"tensor layers {layers} kv_factor {kv_factor} block_size {block_size}"]
        return cls(
            tokens_per_block=tokens_per_block,
            group_ids=(0,),
            windows=(None,),
            planes=(Plane(0, 0, pages.shape[1], pages, tuple(range(layers)), True),),
            bytes_per_block=pages.shape[1],
            dtype=dtype,
            fingerprint=_fingerprint(tokens_per_block, dtype, marks),
            block_size_configured=True,
        )


def _layers_of(buffers: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
    """(layers of a region, is it regular). Regular only where every layer has the same roles in the same order: such
    buffers are equally large, since a pool coalesces buffers by size (KV Cache Connector doc, "KvCacheLayout
    reference")."""
    layers = tuple(sorted({int(buffer.layer_id) for buffer in buffers}))
    roles = {
        layer: [(str(b.role), getattr(b, "expansion", 1)) for b in buffers if int(b.layer_id) == layer]
        for layer in layers
    }
    each = roles[layers[0]] if layers else []
    in_order = [int(buffer.layer_id) for buffer in buffers] == [layer for layer in layers for _ in each]
    return layers, bool(layers) and in_order and all(found == each for found in roles.values())


def _slices(plane: Plane) -> list[Plane]:
    count = len(plane.layers)
    if count < 2 or not plane.regular or plane.size % count:
        return [plane]
    size = plane.size // count
    return [
        Plane(plane.group, plane.offset + at * size, size, plane.pages[:, at * size : (at + 1) * size], (layer,), True)
        for at, layer in enumerate(plane.layers)
    ]


def _unknown(value: object, why: str) -> Refused:
    return Refused(
        "register_kv_cache_layout",
        value,
        why,
        "use a KV cache that describes its pools as layer groups of regions, or set connector.materialization: off",
    )


def _regions(group: Any) -> tuple[Any, ...]:
    """All byte ranges of a page. Some versions keep what every tensor-parallel rank holds alike in a list of its own
    (`replicated_regions`); left out, those bytes of a loaded page would be whatever was there before."""
    if getattr(group, "regions", None) is None:
        raise _unknown(f"layer group {group.layer_group_id}", "it has no regions")
    return (*group.regions, *(getattr(group, "replicated_regions", None) or ()))


def _pages(region: Any, device: torch.device | None) -> torch.Tensor:
    """uint8 `[num_slots, size]`. The region's own view where its version has one, checked; else from its numbers."""
    if hasattr(region, "as_tensor"):
        pages: torch.Tensor = region.as_tensor(torch.uint8)
    else:
        at = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        local = KvCacheRegion(region.base, region.size, region.stride, region.num_slots, (), device=str(at))
        pages = local.as_tensor(torch.uint8)
    if pages.dtype is not torch.uint8 or pages.dim() != 2 or pages.shape[1] != region.size or region.size < 1:
        raise _unknown(
            f"a region of {pages.dtype} {tuple(pages.shape)}", f"it must be [slots, {region.size} bytes] of uint8"
        )
    return pages


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _fingerprint(tokens_per_block: int, dtype: str, marks: list[str]) -> str:
    text = "\n".join([FINGERPRINT_SCHEMA, f"tokens_per_block {tokens_per_block} dtype {dtype}", *marks])
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"semkv-layout").hexdigest()
