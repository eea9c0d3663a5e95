"""A model that computes next to nothing and knows what every page must hold.

The KV of a position is a function of what makes real KV what it is: the weights' seed, the scope of its sequence (salt,
adapter, media), all tokens up to the position, and the layer. So for each position that attention would read,
`ShadowModel` can say whether the page holds exactly what a cold prefill would have put there. Wrong pages are recorded
in `faults` and the pass goes on, because an exception inside the forward pass would only fail the requests.

Logits are a function of the tokens alone: after each prefix one id of the vocabulary is the greedy choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_connector.engine_api.engine import BAD_PAGE_INDEX
from worker_connector.reference_engine.models.kv_pool import GroupPages, KvPool
from worker_connector.reference_engine.models.layer_groups import LayerGroup
from worker_connector.reference_engine.models.model import LayerHook, RowGroup, Segment
from worker_connector.reference_engine.models.model_config import LlamaConfig

#: Two layers of two 32-bit words each for key and value: 32 bytes of KV a token.
SHADOW_TINY = LlamaConfig(
    vocab_size=16,
    hidden_size=2,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    max_position_embeddings=1024,
)

Words = npt.NDArray[np.uint32]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_KEEP_DIGESTS = 1_000_000


@dataclass(frozen=True)
class PageFault:
    """A page that holds, or was used for, something wrong. `position` and `layer` are -1 where a whole page is
    meant."""

    what: str
    #: Layer group, and page slot in it; -1: a block without a page.
    group: int
    slot: int
    #: Request that reads, or owns, the page; -1: none.
    owner: int = -1
    layer: int = -1
    position: int = -1


class ShadowModel:
    """A `ForwardModel` whose KV is words derived from the prefix. Not thread-safe.

    `faults` grows by one entry for every (segment, layer) that reads a wrong word and every page that two segments
    write.
    """

    def __init__(self, config: LlamaConfig = SHADOW_TINY, seed: int = 0) -> None:
        self.config = config
        self.faults: list[PageFault] = []
        #: Positions whose words were compared.
        self.checked = 0
        self._seed = seed
        self._digests: dict[tuple[int, int], int] = {}
        self._roots: dict[Hashable, int] = {}
        width = config.kv_elements_per_token
        salts = np.random.default_rng(7).integers(0, 2**64, (config.num_layers, 2, width), dtype=np.uint64)
        self._salts = salts | np.uint64(1)

    def words(self, scope: Hashable, tokens: Sequence[int]) -> Words:
        """What a cold prefill writes for each position of `tokens`: `[position, layer, key or value, element]`."""
        digests = np.array(self._prefix_digests(scope, tokens), dtype=np.uint64)
        mixed = (digests[:, None, None, None] ^ self._salts) * _ODD
        words: Words = (mixed >> _HALF).astype(np.uint32)
        return words

    def next_token(self, scope: Hashable, tokens: Sequence[int]) -> int:
        """The greedy choice after `tokens`."""
        return self._prefix_digests(scope, tokens)[-1] % self.config.vocab_size

    def forward(
        self,
        pool: KvPool,
        groups: Sequence[RowGroup],
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[list[torch.Tensor | None]]:
        """As `LlamaModel.forward`; segments must say owner, scope and history."""
        words_of = [page_words(pages, pool.tokens_per_block) for pages in pool.groups]
        segments = [segment for group in groups for segment in group.segments]
        for segment in segments:
            assert len(segment.history) == segment.start + len(segment.tokens), "a segment without its history"
        for pages in pool.groups:
            self._check_writers(segments, pages.group, pool.tokens_per_block)
        expected = [self.words(segment.scope, segment.history) for segment in segments]
        for layer in range(self.config.num_layers):
            if before_layer is not None:
                before_layer(layer)
            pages, own_index = pool.of_layer(layer)
            held = words_of[pages.group.group_id][:, own_index]
            for segment, words in zip(segments, expected, strict=True):
                self._write(held, segment, words[:, layer], pages.group, layer)
                self._check(held, segment, words[:, layer], pages.group, layer)
            if after_layer is not None:
                after_layer(layer)
        return [[self._logits(segment) for segment in group.segments] for group in groups]

    def _prefix_digests(self, scope: Hashable, tokens: Sequence[int]) -> list[int]:
        if len(self._digests) > _KEEP_DIGESTS:
            self._digests.clear()
        digest = self._roots.get(scope)
        if digest is None:
            root = hashlib.blake2b(repr((self._seed, scope)).encode(), digest_size=8).digest()
            digest = self._roots[scope] = int.from_bytes(root, "little")
        found: list[int] = []
        known = self._digests
        for token in tokens:
            following = known.get((digest, token))
            if following is None:
                raw = hashlib.blake2b(b"%d" % token, digest_size=8, key=digest.to_bytes(8, "little")).digest()
                following = known[digest, token] = int.from_bytes(raw, "little")
            found.append(following)
            digest = following
        return found

    def _check_writers(self, segments: Sequence[Segment], group: LayerGroup, size: int) -> None:
        """No segment may write where another request of the batch reads or writes."""
        users: dict[int, int] = {}
        for segment in segments:
            for slot in segment.slots[group.group_id][segment.start // size : -(-len(segment.history) // size)]:
                other = users.setdefault(slot, segment.owner)
                if other != segment.owner and slot != BAD_PAGE_INDEX:
                    self._fault(f"also written by request {other}", group, slot, segment)
        for segment in segments:
            for slot in segment.slots[group.group_id][: segment.start // size]:
                other = users.get(slot, segment.owner)
                if other != segment.owner and slot != BAD_PAGE_INDEX:
                    self._fault(f"read while request {other} writes it", group, slot, segment)

    def _write(self, pages: Words, segment: Segment, words: Words, group: LayerGroup, layer: int) -> None:
        positions = np.arange(segment.start, len(segment.history))
        slots, offsets = _addresses(pages, segment, group, positions)
        if (slots == BAD_PAGE_INDEX).any():
            self._fault("computed tokens have no page", group, BAD_PAGE_INDEX, segment, layer, segment.start)
            positions = positions[slots != BAD_PAGE_INDEX]
            slots, offsets = _addresses(pages, segment, group, positions)
        pages[slots, :, offsets] = words[positions]

    def _check(self, pages: Words, segment: Segment, words: Words, group: LayerGroup, layer: int) -> None:
        """Checks what the segment's first position reads; that includes all older KV that any of its positions
        reads."""
        positions = np.arange(group.first_visible(segment.start), segment.start)
        if group.sink_tokens and len(positions) < segment.start:
            sinks = np.arange(min(group.sink_tokens, group.first_visible(segment.start)))
            positions = np.concatenate((sinks, positions))
        self.checked += len(positions)
        slots, offsets = _addresses(pages, segment, group, positions)
        wrong = (pages[slots, :, offsets] != words[positions]).any(axis=(1, 2)) | (slots == BAD_PAGE_INDEX)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            what = f"{int(wrong.sum())} positions do not hold what a cold prefill writes"
            self._fault(what, group, int(slots[first]), segment, layer, int(positions[first]))

    def _fault(
        self, what: str, group: LayerGroup, slot: int, segment: Segment, layer: int = -1, position: int = -1
    ) -> None:
        self.faults.append(PageFault(what, group.group_id, slot, segment.owner, layer, position))

    def _logits(self, segment: Segment) -> torch.Tensor | None:
        if not segment.wants_logits:
            return None
        logits = torch.zeros(self.config.vocab_size)
        logits[self.next_token(segment.scope, segment.history)] = 1.0
        return logits


def page_words(pages: GroupPages, tokens_per_block: int) -> Words:
    """The pages' own memory as `[slot, layer of the group, key or value, token, element]` of 32-bit words."""
    words: Any = pages.tensor.view(torch.int32).numpy().view(np.uint32)
    blocks, layers, kv_factor, _ = words.shape
    shaped: Words = words.reshape(blocks, layers, kv_factor, tokens_per_block, -1)
    return shaped


def _addresses(pages: Words, segment: Segment, group: LayerGroup, positions: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    size = pages.shape[2]
    return np.asarray(segment.slots[group.group_id], dtype=np.int64)[positions // size], positions % size
