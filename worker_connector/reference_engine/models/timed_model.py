"""A model that computes nothing and knows what every page must hold, cheap enough for prompts of 100,000 tokens.

As in `models/shadow_model.py`, the KV of a position is a function of the weights' seed, the scope of its sequence and
all tokens up to the position. Here it is a polynomial in the tokens, so that NumPy makes it for a whole prompt at once
and a decode adds one word. A prefill chunk checks every position that it reads. In one of eight passes a decode checks
its newest page and an older one, another one each time.

Pages that hold something else are counted and logged as errors, and the pass goes on.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.model import LayerHook, RowGroup, Segment
from worker_connector.reference_engine.models.model_config import LlamaConfig
from worker_connector.reference_engine.models.shadow_model import page_words

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

Words = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_KEEP_SEQUENCES = 256
"""Of each pool; more than run at once."""
_ROOM = 256
"""Words that a sequence may grow by before its array is copied."""
_CHECK_EVERY = 8
"""Passes between two checks of a decode."""
_ALL = 2**64 - 1
_PRINTABLE = 94
"""Token ids below this are printable ASCII in the byte tokenizer."""


class _Sequence:
    """What the positions of one sequence hold: a word each, made as the sequence grows."""

    __slots__ = ("_digests", "length")

    def __init__(self) -> None:
        self._digests: U64 = np.empty(0, np.uint64)
        self.length = 0

    @property
    def digests(self) -> U64:
        """Shape [length], a view."""
        return self._digests[: self.length]

    def grow(self, history: Sequence[int], root: int, powers: U64) -> None:
        """Make it as long as `history`, with whose tokens it began. `powers`: at least as many."""
        have, n = self.length, len(history)
        self.length = n
        if n <= have:  # the sequence lost its pages and starts over
            return
        if n > len(self._digests):
            self._digests = np.concatenate((self._digests[:have], np.empty(n - have + _ROOM, np.uint64)))
        last = int(self._digests[have - 1]) if have else root
        if n == have + 1:
            self._digests[have] = (last + (history[have] + 1) * int(powers[have])) & _ALL
            return
        new = np.array(history[have:], np.uint64) + np.uint64(1)
        new *= powers[have:n]
        new[:1] += np.uint64(last)
        np.add.accumulate(new, out=self._digests[have:n])


class _Sequences:
    """The sequences of one pool; the one that ran longest ago goes first."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[tuple[int, Hashable], _Sequence] = OrderedDict()

    def of(self, owner: int, scope: Hashable) -> _Sequence:
        """The sequence of a request, an empty one at first."""
        found = self._by_owner.setdefault((owner, scope), _Sequence())
        self._by_owner.move_to_end((owner, scope))
        while len(self._by_owner) > _KEEP_SEQUENCES:
            self._by_owner.popitem(last=False)
        return found


class TimedModel:
    """A `ForwardModel`. Not thread-safe: the ranks of a process take turns."""

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        self.config = config
        #: Positions whose words were compared, and those of them that held something else.
        self.checked = 0
        self.faults = 0
        self._seed = seed
        self._powers = _powers(1 << 14)
        #: Of each pool, since request ids are an engine's own and engines may share a model.
        self._known: WeakKeyDictionary[KvPool, _Sequences] = WeakKeyDictionary()
        self._turn = 0

    def forward(
        self,
        pool: KvPool,
        groups: Sequence[RowGroup],
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[list[torch.Tensor | None]]:
        """As `LlamaModel.forward`; segments must say owner, scope and history. There is one layer of full
        attention."""
        held = page_words(pool.groups[0], pool.tokens_per_block)[:, 0]
        known = self._known.setdefault(pool, _Sequences())
        expected = [[self._digests(known, one) for one in group.segments] for group in groups]
        self._turn += 1
        if before_layer is not None:
            before_layer(0)
        for group, digests_of in zip(groups, expected, strict=True):
            for segment, digests in zip(group.segments, digests_of, strict=True):
                self._write(held, segment, digests, pool.tokens_per_block)
                self._check(held, segment, digests, pool.tokens_per_block)
        if after_layer is not None:
            after_layer(0)
        return [
            [self._logits(segment, digests) for segment, digests in zip(group.segments, digests_of, strict=True)]
            for group, digests_of in zip(groups, expected, strict=True)
        ]

    def _digests(self, known: _Sequences, segment: Segment) -> U64:
        """A word for each position of the segment's history, shape [n]."""
        n = len(segment.history)
        if n > len(self._powers):
            self._powers = _powers(1 << n.bit_length())
        sequence = known.of(segment.owner, segment.scope)
        sequence.grow(segment.history, self._root(segment.scope) if sequence.length == 0 else 0, self._powers)
        return sequence.digests

    def _root(self, scope: Hashable) -> int:
        """What a sequence begins with."""
        raw = hashlib.blake2b(repr((self._seed, scope)).encode(), digest_size=8).digest()
        return int.from_bytes(raw, "little")

    def _write(self, held: Words, segment: Segment, digests: U64, size: int) -> None:
        """`held`: `[slot, key or value, token, element]`."""
        start, slots = segment.start, segment.slots[0]
        if len(segment.tokens) == 1:
            held[slots[start // size], :, start % size] = _words(digests[start:])[0]
            return
        positions = np.arange(start, start + len(segment.tokens))
        held[np.asarray(slots, np.int64)[positions // size], :, positions % size] = _words(digests[start:])

    def _check(self, held: Words, segment: Segment, digests: U64, size: int) -> None:
        start = segment.start
        if len(segment.tokens) > 1:
            self._compare(held, segment, digests, np.arange(start), size)
        elif start >= size and (self._turn + segment.owner) % _CHECK_EVERY == 0:
            older = (self._turn // _CHECK_EVERY) % (start // size) * size
            newest = start // size * size
            read = np.concatenate((np.arange(older, older + size), np.arange(newest, start)))
            self._compare(held, segment, digests, read, size)

    def _compare(self, held: Words, segment: Segment, digests: U64, read: npt.NDArray[np.int64], size: int) -> None:
        """The words at positions `read` of the segment's sequence against those that a cold prefill writes."""
        self.checked += len(read)
        slots = np.asarray(segment.slots[0], np.int64)
        wrong = (held[slots[read // size], :, read % size] != _words(digests[read])).any(axis=(1, 2))
        if wrong.any():
            count = int(wrong.sum())
            self.faults += count
            text = "request %d reads %d positions that do not hold what a cold prefill writes, the first at %d"
            _throttled.error(text, segment.owner, count, int(read[int(wrong.argmax())]), key="wrong page")

    def _logits(self, segment: Segment, digests: U64) -> torch.Tensor | None:
        if not segment.wants_logits:
            return None
        logits = torch.zeros(self.config.vocab_size)
        logits[int(_mixed(digests[-1:])[0]) % _PRINTABLE] = 1.0
        return logits


def _powers(count: int) -> U64:
    steps = np.full(count, _BASE, np.uint64)
    steps[0] = 1
    powers: U64 = np.multiply.accumulate(steps)
    return powers


def _mixed(digests: U64) -> U64:
    mixed: U64 = (digests ^ (digests >> _HALF)) * _MIX
    mixed ^= mixed >> _HALF
    return mixed


def _words(digests: U64) -> Words:
    """What a position's key and value hold, shape [n, 2, 2]."""
    mixed = _mixed(digests)
    words = np.empty((len(digests), 2, 2), np.uint32)
    words[:, 0, 0] = mixed & _LOW
    words[:, 0, 1] = mixed >> _HALF
    words[:, 1, 0] = ~words[:, 0, 0]
    words[:, 1, 1] = ~words[:, 0, 1]
    return words
