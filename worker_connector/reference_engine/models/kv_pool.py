"""The paged KV memory of one rank, and its description for a connector.

Each layer group has a tensor `[num_blocks, layers of the group, kv_factor, block_size]` float32, in host memory or on a
GPU: kv_factor 2 is key then value, block_size is `tokens_per_block * num_kv_heads * head_dim` with the token as the
outer dimension. A page slot is an index into one group's tensor. The pool knows bytes and page slots, not tokens or
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker_connector.engine_api.engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.reference_engine.models.layer_groups import LayerGroup, layer_groups
from worker_connector.reference_engine.models.model_config import LlamaConfig

_KV_FACTOR = 2
_ROLES = ("key", "value")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`. The host does not wait for work that is enqueued there: a forward pass must stay
    behind its loads in stream order only."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class GroupPages:
    """The pages of one layer group. Layers are counted within the group."""

    def __init__(
        self,
        group: LayerGroup,
        config: LlamaConfig,
        num_blocks: int,
        tokens_per_block: int,
        fill: float,
        device: torch.device,
    ) -> None:
        self.group = group
        self._config = config
        self._device = device
        self._tokens_per_block = tokens_per_block
        width = config.kv_elements_per_token
        layers = len(group.layers)
        shape = (num_blocks, layers, _KV_FACTOR, tokens_per_block * width)
        self.tensor = torch.full(shape, fill, dtype=torch.float32, device=device)
        self._rows_per_block = layers * _KV_FACTOR
        self._pages = self.tensor.view(num_blocks * self._rows_per_block, tokens_per_block * width)
        self._token_rows = self.tensor.view(num_blocks * self._rows_per_block * tokens_per_block, width)

    def page_rows(self, slots: Sequence[int]) -> torch.Tensor:
        """Addresses of whole pages for `read`: layer 0's keys of each slot, then its values. Shape `[2 * len(slots)]`.

        IndexError for a block without a page: -1 would address the last page of the pool.
        """
        if min(slots, default=0) < 0:
            raise IndexError(f"group {self.group.group_id}: a block that attention reads has no page")
        first = torch.as_tensor(slots, dtype=torch.int64) * self._rows_per_block
        return to_device(torch.cat((first, first + 1)), self._device)

    def token_rows(self, slots: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Addresses for `write` of tokens [start, end) of a sequence on `slots`. Shape `[end - start]`. IndexError for
        a token whose block has no page."""
        positions = torch.arange(start, end)
        pages = torch.as_tensor(slots, dtype=torch.int64)[positions // self._tokens_per_block]
        if (pages < 0).any():
            raise IndexError(f"group {self.group.group_id}: tokens [{start}, {end}) have no page to be written to")
        rows = pages * (self._rows_per_block * self._tokens_per_block) + positions % self._tokens_per_block
        return to_device(rows, self._device)

    def write(self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `[tokens, kv_elements_per_token]` keys and values at the addresses from `token_rows`."""
        key_rows = token_rows + layer * _KV_FACTOR * self._tokens_per_block
        self._token_rows.index_copy_(0, key_rows, keys)
        self._token_rows.index_copy_(0, key_rows + self._tokens_per_block, values)

    def read(self, layer: int, page_rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First `length` tokens of the pages, each `[1, num_kv_heads, length, head_dim]`.

        Copies the sequence's own pages, never the pool. The result depends on page contents only, not on which slots
        hold them: that is what makes loaded KV bit-identical to computed KV.
        """
        pages = self._pages.index_select(0, page_rows + layer * _KV_FACTOR)
        both = pages.view(_KV_FACTOR, -1, self._config.num_kv_heads, self._config.head_dim)[:, :length]
        keys, values = both.transpose(1, 2).unsqueeze(1)
        return keys, values

    def layout(self) -> KvCacheLayerGroupLayout:
        """One region: the buffers of a page follow each other."""
        page_bytes = self.tensor.stride(0) * self.tensor.element_size()
        # TensorRT-LLM's own class has no such field: its pools are always on the GPU.
        where: dict[str, Any] = {} if self._device.type == "cpu" else {"device": str(self.tensor.device)}
        region = KvCacheRegion(
            base=self.tensor.data_ptr(),
            size=page_bytes,
            stride=page_bytes,
            num_slots=self.tensor.shape[0],
            buffers=tuple(KvCacheBufferRef(layer, role) for layer in self.group.layers for role in _ROLES),
            **where,
        )
        return KvCacheLayerGroupLayout(
            layer_group_id=self.group.group_id,
            layer_ids=self.group.layers,
            window_size=self.group.window,
            regions=(region,),
        )


class KvPool:
    """KV pages of one rank, `num_blocks` in each layer group; without `groups`, one group of full attention.

    With `poison=True` every page holds NaN until something writes it, so attention over a page that nobody filled shows
    in the logits.
    """

    def __init__(
        self,
        config: LlamaConfig,
        num_blocks: int,
        tokens_per_block: int,
        *,
        poison: bool = False,
        device: torch.device | None = None,
        groups: Sequence[LayerGroup] = (),
    ) -> None:
        self.config = config
        self.device = device or torch.device("cpu")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        fill = float("nan") if poison else 0.0
        self.groups = tuple(
            GroupPages(group, config, num_blocks, tokens_per_block, fill, self.device)
            for group in groups or layer_groups(config.num_layers)
        )
        self._of_layer = {
            layer: (pages, index) for pages in self.groups for index, layer in enumerate(pages.group.layers)
        }
        self._poison = poison
        #: Called with the group and the slots that the engine itself wrote outside a forward pass.
        self.on_write: Callable[[int, Sequence[int]], None] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The first group's pages; with one group the whole pool."""
        return self.groups[0].tensor

    def of_layer(self, layer: int) -> tuple[GroupPages, int]:
        """The pages of a model layer, and which of their layers it is."""
        return self._of_layer[layer]

    def poison(self, group: int, slots: Sequence[int]) -> None:
        """Forget the contents of pages that change hands; does nothing unless poisoning is on."""
        if self._poison and slots:
            self.groups[group].tensor.index_fill_(0, to_device(torch.as_tensor(slots), self.device), float("nan"))
            self._written(group, slots)

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy all layers of one page of a group to another page of it."""
        pages = self.groups[group].tensor
        pages[target].copy_(pages[source])
        self._written(group, [target])

    def _written(self, group: int, slots: Sequence[int]) -> None:
        if self.on_write is not None:
            self.on_write(group, slots)

    def layout(self) -> KvCacheLayout:
        """The description of all groups. Views of them are valid as long as this object lives."""
        groups = tuple(pages.layout() for pages in self.groups)
        return KvCacheLayout(tokens_per_block=self.tokens_per_block, groups=groups, dtype=self.tensor.dtype)
