"""The paged KV memory of one rank, and its description for a connector.

The pool is `[num_blocks, num_layers, kv_factor, block_size]` float32, in host memory or on a GPU: kv_factor 2 is key then value,
block_size is `tokens_per_block * num_kv_heads * head_dim` with the token as the outer dimension. It knows bytes and
page slots, not tokens or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker_connector.engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.reference_engine.model_config import LlamaConfig

_KV_FACTOR = 2
_ROLES = ("key", "value")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`, without the host waiting for what is enqueued there: a forward pass must stay behind its loads in
    stream order only."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class KvPool:
    """KV pages of one rank.

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
    ) -> None:
        self.config = config
        self.device = device or torch.device("cpu")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        width = config.kv_elements_per_token
        shape = (num_blocks, config.num_layers, _KV_FACTOR, tokens_per_block * width)
        self.tensor = torch.full(shape, float("nan") if poison else 0.0, dtype=torch.float32, device=self.device)
        self._poison = poison
        #: Told of the slots whose contents were forgotten.
        self.on_poison: Callable[[Sequence[int]], None] | None = None
        self._rows_per_block = config.num_layers * _KV_FACTOR
        self._pages = self.tensor.view(num_blocks * self._rows_per_block, tokens_per_block * width)
        self._token_rows = self.tensor.view(num_blocks * self._rows_per_block * tokens_per_block, width)

    def poison(self, slots: Sequence[int]) -> None:
        """Forget the contents of pages that change hands; does nothing unless poisoning is on."""
        if self._poison and slots:
            self.tensor.index_fill_(0, to_device(torch.as_tensor(slots), self.device), float("nan"))
            if self.on_poison is not None:
                self.on_poison(slots)

    def page_rows(self, slots: Sequence[int]) -> torch.Tensor:
        """Addresses of whole pages for `read`: layer 0's keys of each slot, then its values. Shape `[2 * len(slots)]`."""
        first = torch.as_tensor(slots, dtype=torch.int64) * self._rows_per_block
        return to_device(torch.cat((first, first + 1)), self.device)

    def token_rows(self, slots: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Addresses for `write` of tokens [start, end) of a sequence on `slots`. Shape `[end - start]`."""
        positions = torch.arange(start, end)
        pages = torch.as_tensor(slots, dtype=torch.int64)[positions // self.tokens_per_block]
        rows = pages * (self._rows_per_block * self.tokens_per_block) + positions % self.tokens_per_block
        return to_device(rows, self.device)

    def write(self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `[tokens, kv_elements_per_token]` keys and values at the addresses from `token_rows`."""
        key_rows = token_rows + layer * _KV_FACTOR * self.tokens_per_block
        self._token_rows.index_copy_(0, key_rows, keys)
        self._token_rows.index_copy_(0, key_rows + self.tokens_per_block, values)

    def read(self, layer: int, page_rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First `length` tokens of a sequence, each `[1, num_kv_heads, length, head_dim]`.

        Copies the sequence's own pages, never the pool. The result depends on page contents only, not on which slots
        hold them: that is what makes loaded KV bit-identical to computed KV.
        """
        pages = self._pages.index_select(0, page_rows + layer * _KV_FACTOR)
        both = pages.view(_KV_FACTOR, -1, self.config.num_kv_heads, self.config.head_dim)[:, :length]
        keys, values = both.transpose(1, 2).unsqueeze(1)
        return keys, values

    def layout(self) -> KvCacheLayout:
        """The pool as one layer group of one region. Views of it are valid as long as this object lives."""
        layers = range(self.config.num_layers)
        page_bytes = self.tensor.stride(0) * self.tensor.element_size()
        # TensorRT-LLM's own class has no such field: its pools are always on the GPU.
        where: dict[str, Any] = {} if self.device.type == "cpu" else {"device": str(self.tensor.device)}
        region = KvCacheRegion(
            base=self.tensor.data_ptr(),
            size=page_bytes,
            stride=page_bytes,
            num_slots=self.num_blocks,
            buffers=tuple(KvCacheBufferRef(layer, role) for layer in layers for role in _ROLES),
            **where,
        )
        group = KvCacheLayerGroupLayout(layer_group_id=0, layer_ids=tuple(layers), window_size=None, regions=(region,))
        return KvCacheLayout(tokens_per_block=self.tokens_per_block, groups=(group,), dtype=self.tensor.dtype)
