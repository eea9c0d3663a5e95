"""DonorRegistry: which earlier prompts of this replica others may be sent to, and the events that say so.

A donor is a prompt (with what was generated) whose KV is here: resident in the slab, or, with materialization off, on the device as far as
the engine's own cache keeps it. It carries a DonorSketch, never tokens. All work is done on the background thread, none on the
scheduler's; only `get` may be called from elsewhere.

Blocks leave the slab from the end of a chain, so a donor is indexed under its last block only. As blocks leave, it shrinks to what is
still there: it stays as it is while little is missing, is registered again, shorter, when more than an eighth is, and is evicted when less
than half is left. So evidence overstates a donor by an eighth at the most, and pressure on the slab does not become a storm of events.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorEvicted,
    DonorRegistered,
    DonorSegment,
    WireNamespace,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import DonorId, Generation, new_donor_id
from dynamo_semkv.contracts.keys import BlockKey, block_keys
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch
from worker_connector.donor_stream import DonorStream
from worker_connector.ledger import BlockEntry
from worker_connector.request_view import unpack_tokens

_TOLERATED_LOSS = 1 / 8
_KEPT_SHARE = 1 / 2


@dataclass(frozen=True)
class KnownDonor:
    """What a verdict may ask about a donor of this replica."""

    donor_id: DonorId
    namespace: CacheNamespace
    tokens: int
    tip: BlockEntry | None
    """Its last resident block; None with materialization off."""


@dataclass
class _Donor:
    donor_id: DonorId
    namespace: CacheNamespace
    digest: bytes
    tip_key: BlockKey
    tip: BlockEntry | None
    blocks: int
    """Resident now."""
    event: DonorRegistered
    """As registered last."""
    registered_blocks: int


class DonorRegistry:
    """One replica's donors, at most `max_donors`, the least recently registered or repeated go first."""

    def __init__(
        self, stream: DonorStream, generation: Generation, tokens_per_block: int, min_donor_tokens: int, max_donors: int
    ) -> None:
        self._stream = stream
        self._generation = generation
        self._tokens_per_block = tokens_per_block
        self._min_tokens = max(min_donor_tokens, tokens_per_block)
        self._max = max_donors
        self._lock = threading.Lock()
        self._donors: OrderedDict[DonorId, _Donor] = OrderedDict()
        self._by_tip: dict[BlockKey, _Donor] = {}
        self.counts: Counter[str] = Counter()
        """`registered`, `repeated`, `superseded`, `too_short`, `shrunk`, `evicted`, `crowded_out`, `resets`, `unsent`, `invalid`."""

    @property
    def generation(self) -> Generation:
        return self._generation

    @property
    def events_beyond_donors(self) -> int:
        """Events since the last reset that a reset would make needless."""
        return max(0, self._stream.since_reset - len(self._donors))

    def __len__(self) -> int:
        return len(self._donors)

    def get(self, donor_id: str) -> KnownDonor | None:
        with self._lock:
            donor = self._donors.get(DonorId(donor_id))
            if donor is None:
                return None
            return KnownDonor(donor.donor_id, donor.namespace, donor.blocks * self._tokens_per_block, donor.tip)

    def open(self) -> None:
        """Announces this life of the cache; before any donor."""
        self._stream.reset(self._generation)

    def register_resident(self, namespace: CacheNamespace, tip: BlockEntry) -> DonorId | None:
        """The chain that ends in `tip` becomes a donor of the host tier. A donor that it continues is superseded."""
        while tip.removed and tip.parent is not None:
            tip = tip.parent  # blocks that left before this job ran
        path = tip.chain()
        tokens = b"".join(entry.tokens for entry in path)
        chain = [entry.key for entry in path]
        return self._register(namespace, tip.digest, tokens, chain, tip)

    def register_computed(self, namespace: CacheNamespace, digest: bytes, tokens: bytes) -> DonorId | None:
        """Materialization is off: full blocks that the engine computed become a donor of the device tier."""
        chain = block_keys(digest, unpack_tokens(tokens), self._tokens_per_block)
        return self._register(namespace, digest, tokens[: len(chain) * self._tokens_per_block * 4], chain, None)

    def departed(self, entries: Iterable[BlockEntry]) -> None:
        """Blocks left the slab, deepest first."""
        shrunk: dict[DonorId, _Donor] = {}
        with self._lock:
            for entry in entries:
                donor = self._by_tip.pop(entry.key, None)
                if donor is None:
                    continue
                parent = entry.parent
                donor.blocks = entry.ordinal
                donor.tip = parent if parent is not None and parent.ordinal >= 0 else None
                shrunk[donor.donor_id] = donor
                if donor.tip is not None and donor.tip.key not in self._by_tip:
                    donor.tip_key = donor.tip.key
                    self._by_tip[donor.tip_key] = donor
                else:
                    donor.blocks = 0  # nothing left, or another donor says the same
        for donor in shrunk.values():
            self._shrink(donor)

    def reset(self, generation: Generation, *, resident: bool) -> None:
        """A new life of the stream. `resident`: the blocks are still here and events were lost, so everything is registered again;
        otherwise the cache itself was reset and nothing is left."""
        with self._lock:
            self._generation = generation
            donors = list(self._donors.values()) if resident else []
            if not resident:
                self._donors.clear()
                self._by_tip.clear()
            self.counts["resets"] += 1
        self._stream.reset(generation)
        for donor in donors:
            self._announce(donor)

    def _register(
        self, namespace: CacheNamespace, digest: bytes, tokens: bytes, chain: list[BlockKey], tip: BlockEntry | None
    ) -> DonorId | None:
        if len(chain) * self._tokens_per_block < self._min_tokens:
            self.counts["too_short"] += 1
            return None
        with self._lock:
            same = self._by_tip.get(chain[-1])
            if same is not None:
                self._donors.move_to_end(same.donor_id)
                self.counts["repeated"] += 1
                return same.donor_id
        donor_id = new_donor_id()
        event = self._describe(donor_id, namespace, digest, tokens, chain, tip is not None)
        if event is None:
            return None
        donor = _Donor(donor_id, namespace, digest, chain[-1], tip, len(chain), event, len(chain))
        with self._lock:
            older = [found for key in chain if (found := self._by_tip.pop(key, None)) is not None]
            for found in older:
                del self._donors[found.donor_id]
            crowded = []
            while len(self._donors) >= self._max:
                _, oldest = self._donors.popitem(last=False)
                del self._by_tip[oldest.tip_key]
                crowded.append(oldest)
            self._donors[donor_id] = donor
            self._by_tip[donor.tip_key] = donor
        for found in older:
            self.counts["superseded"] += 1
            self._emit_evicted(found)
        for found in crowded:
            self.counts["crowded_out"] += 1
            self._emit_evicted(found)
        self.counts["registered"] += 1
        self._announce(donor)
        return donor_id

    def _describe(
        self,
        donor_id: DonorId,
        namespace: CacheNamespace,
        digest: bytes,
        tokens: bytes,
        chain: list[BlockKey],
        resident: bool,
    ) -> DonorRegistered | None:
        token_count = len(chain) * self._tokens_per_block
        sketch = DonorSketch.of(unpack_tokens(tokens), digest, chain)
        integrity = int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little")
        try:
            return DonorRegistered(
                donor_id=donor_id,
                namespace=wire_namespace(namespace, digest),
                location=WorkerLocation(
                    worker_id=self._stream.worker_id,
                    dp_rank=self._stream.dp_rank,
                    tier=Tier.HOST_PINNED if resident else Tier.DEVICE,
                ),
                token_count=token_count,
                segments=[
                    DonorSegment(
                        segment_id=0,
                        token_range=(0, token_count),
                        digest=integrity,
                        provider_metadata=sketch.to_bytes(),
                    )
                ],
                provider_generation=self._generation,
            )
        except ContractError:
            self.counts["invalid"] += 1
            return None

    def _shrink(self, donor: _Donor) -> None:
        left = donor.blocks / donor.registered_blocks
        if left < _KEPT_SHARE or donor.blocks * self._tokens_per_block < self._min_tokens or donor.tip is None:
            with self._lock:
                self._donors.pop(donor.donor_id, None)
                if self._by_tip.get(donor.tip_key) is donor:
                    del self._by_tip[donor.tip_key]
            self.counts["evicted"] += 1
            self._emit_evicted(donor)
        elif left < 1 - _TOLERATED_LOSS:
            path = donor.tip.chain()
            tokens = b"".join(entry.tokens for entry in path)
            event = self._describe(
                donor.donor_id, donor.namespace, donor.digest, tokens, [entry.key for entry in path], True
            )
            if event is not None:
                donor.event, donor.registered_blocks = event, len(path)
                self.counts["shrunk"] += 1
                self._announce(donor)

    def _announce(self, donor: _Donor) -> None:
        if donor.event.provider_generation != self._generation:
            donor.event = _with_generation(donor.event, self._generation)
        self._sent(self._stream.emit(donor.event))

    def _emit_evicted(self, donor: _Donor) -> None:
        self._sent(self._stream.emit(DonorEvicted(donor_id=donor.donor_id, provider_generation=self._generation)))

    def _sent(self, sent: bool) -> None:
        if not sent:
            self.counts["unsent"] += 1


def _with_generation(event: DonorRegistered, generation: Generation) -> DonorRegistered:
    return DonorRegistered(
        donor_id=event.donor_id,
        namespace=event.namespace,
        location=event.location,
        token_count=event.token_count,
        segments=event.segments,
        provider_generation=generation,
    )


def wire_namespace(namespace: CacheNamespace, digest: bytes) -> WireNamespace:
    """The hard key of the event format; the digest in `extra` is what our own consumers compare."""
    return WireNamespace(
        model=namespace.model or "",
        tokenizer=namespace.tokenizer or "",
        kv_layout=namespace.kv_layout or "",
        block_size=namespace.tokens_per_block or 0,
        lora=namespace.lora or None,
        quant=namespace.kv_dtype,
        extra={NAMESPACE_DIGEST_EXTRA: digest.hex()},
    )
