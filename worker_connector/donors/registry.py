"""DonorRegistry: which earlier prompts of this replica others may be sent to, and the events that say so.

A donor is a prompt (with what was generated) whose KV is here: resident in the slab, on the disk below it, or on the
device as far as the engine's own cache keeps it; with materialization off there alone. It carries a DonorSketch, never
tokens. All work is done on the background thread, none on the scheduler's; only `get` may be called from elsewhere.

Blocks leave every tier from the end of a chain, so a donor is indexed under its last blocks only. As blocks leave, it
shrinks to what is still there: it stays as it is while little is missing, is registered again, shorter, when more than
an eighth is, and is evicted when less than half is left. Of our own tiers it is told to be shorter a second later: a
chain that begins to leave has most often left by then, and one event says so instead of two. So, but for that second,
evidence overstates a donor by an eighth at the most, and pressure on the slab does not become a storm of events.

Its tier is the nearest one that misses no more than an eighth of it: the device, by the engine's KV cache events, the
slab, else the disk. It is registered again when that changes; where the device is concerned a second later too, since
what the engine keeps comes and goes with every prompt.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered
from dynamo_semkv.contracts.identity import DonorId, Generation, new_donor_id
from dynamo_semkv.contracts.keys import BlockKey, block_keys, root_key
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.disk.index import DiskBlock
from worker_connector.donors.device_blocks import DeviceBlock
from worker_connector.donors.donor import (
    KEPT_SHARE,
    NO_TIERS,
    TOLERATED_LOSS,
    Donor,
    KnownDonor,
    Tiers,
    last_of,
    tier_of,
)
from worker_connector.donors.donor_event import describe, moved, with_generation
from worker_connector.donors.donor_index import DonorIndex
from worker_connector.donors.donor_stream import DonorStream, Sent
from worker_connector.engine_api.request_view import unpack_tokens
from worker_connector.ledger.block import BlockEntry

RESTATE_PAUSE_SECONDS = 0.02
"""Between two looks for room while everything is registered anew."""
SHRINK_SECONDS = 1.0
"""How long a donor may be shorter than it was said to be, or on the device or not, other than it was said to be."""


class DonorRegistry:
    """One replica's donors, at most `max_donors`, the least recently registered or repeated go first."""

    def __init__(
        self,
        stream: DonorStream,
        generation: Generation,
        tokens_per_block: int,
        min_donor_tokens: int,
        max_donors: int,
        clock: Callable[[], float],
        tiers: Tiers = NO_TIERS,
    ) -> None:
        self._tiers = tiers
        self._stream = stream
        self._generation = generation
        self._tokens_per_block = tokens_per_block
        self._min_tokens = max(min_donor_tokens, tokens_per_block)
        self._max = max_donors
        self._lock = threading.Lock()
        self._donors: OrderedDict[DonorId, Donor] = OrderedDict()
        self._clock = clock
        self._changing: dict[DonorId, float] = {}
        """Shorter than they were said to be, or on the device or not other than that, and since when; oldest first."""
        self._unstated: dict[DonorId, None] = {}
        """Not said in this generation yet, in the order in which they are."""
        self._restated_at = 0.0
        self._index = DonorIndex()
        self.counts: Counter[str] = Counter()
        """`registered`, `repeated`, `superseded`, `too_short`, `shrunk`, `moved` (between slab and disk), `restored`
        (from disk, of an earlier life), `evicted`, `crowded_out`, `resets`, `unsent`, `unstorable` (larger than the
        broker takes), `invalid`, `unvouched`, `doubtful`."""

    @property
    def generation(self) -> Generation:
        """The generation of the cache that its events belong to."""
        return self._generation

    @property
    def events_beyond_donors(self) -> int | None:
        """Events since the last reset that a reset would make needless; None: what is here is still being said."""
        return None if self._unstated else max(0, self._stream.since_reset - len(self._donors))

    @property
    def served(self) -> int:
        """Prompts of this life that were, or already had been, registered."""
        return self.counts["registered"] - self.counts["restored"] + self.counts["repeated"]

    def __len__(self) -> int:
        return len(self._donors)

    def get(self, donor_id: str) -> KnownDonor | None:
        """What is here of a donor; None if it is not known. Any thread."""
        with self._lock:
            donor = self._donors.get(DonorId(donor_id))
            if donor is None:
                return None
            tokens = donor.blocks * self._tokens_per_block
            return KnownDonor(donor.donor_id, donor.namespace, tokens, donor.tip, donor.below)

    def open(self) -> None:
        """Announces this life of the cache; before any donor."""
        self._stream.reset(self._generation)

    # becoming a donor

    def register_resident(self, namespace: CacheNamespace, tip: BlockEntry) -> DonorId | None:
        """The chain that ends in `tip` becomes a donor of the host tier. A donor that it continues is superseded."""
        while tip.removed and tip.parent is not None:
            tip = tip.parent  # blocks that left before this job ran
        path = tip.chain()
        tokens = b"".join(entry.tokens for entry in path)
        return self._register(namespace, tip.digest, tokens, [entry.key for entry in path], tip=tip)

    def register_on_disk(self, namespace: CacheNamespace, end: DiskBlock) -> DonorId | None:
        """The chain that ends in `end` was left on disk by an earlier life. What of it was brought up meanwhile is
        looked up."""
        at: DiskBlock | None = end
        while at is not None and not at.usable:
            at = at.parent  # blocks that left before this job ran
        if at is None:
            return None
        path = at.chain()
        tip = None
        for block in path:
            entry = self._tiers.in_slab(block.key)
            if entry is None or not entry.resident:
                break
            tip = entry
        below = None if tip is not None and tip.ordinal == at.ordinal else at
        tokens = b"".join(block.tokens for block in path)
        self.counts["restored"] += 1
        return self._register(namespace, at.digest, tokens, [block.key for block in path], tip=tip, below=below)

    def register_computed(self, namespace: CacheNamespace, digest: bytes, tokens: bytes) -> DonorId | None:
        """Materialization is off: full blocks that the engine computed become a donor of the device tier."""
        chain = block_keys(digest, unpack_tokens(tokens), self._tokens_per_block)
        return self._register(namespace, digest, tokens[: len(chain) * self._tokens_per_block * 4], chain)

    # blocks come and go

    def departed(self, entries: Iterable[BlockEntry]) -> None:
        """Blocks left the slab, deepest first. What is on disk or on the device is there still."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for entry in entries:
                parent = entry.parent if entry.parent is not None and entry.parent.ordinal >= 0 else None
                for donor in self._index.with_tip(entry.key):
                    below = donor.below or self._tiers.on_disk(entry.key)
                    self._index.move(donor, parent, below, donor.device)
                    touched[donor.donor_id] = donor
        self._settle(touched, patient=True)

    def stored(self, entries: Sequence[BlockEntry]) -> None:
        """Consecutive blocks of a chain became resident: donors that went on elsewhere there have them back."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            first = entries[0]
            above = root_key(first.digest) if first.ordinal == 0 or first.parent is None else first.parent.key
            for donor in self._index.with_tip(above):
                tip = last_of(donor.end, entries)
                if tip is None:
                    continue
                self._index.move(donor, tip, donor.below, donor.device)
                touched[donor.donor_id] = donor
        self._settle(touched)

    def disk_gone(self, blocks: Iterable[DiskBlock]) -> None:
        """Blocks left the disk, deepest first."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for block in blocks:
                for donor in self._index.with_below(block.key):
                    self._index.move(donor, donor.tip, block.parent, donor.device)
                    touched[donor.donor_id] = donor
        self._settle(touched)

    def device_stored(self, blocks: Iterable[DeviceBlock]) -> None:
        """The engine says that its own cache holds these, and all that they continue."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for block in blocks:
                donor = self._index.at_end(block.key)
                if donor is not None and not donor.by_engine and donor.device is not block:
                    self._index.move(donor, donor.tip, donor.below, block)
                    touched[donor.donor_id] = donor
        self._settle(touched, patient=True)

    def device_gone(self, blocks: Iterable[DeviceBlock]) -> None:
        """The engine says that it removed blocks from its own cache; deepest first, with all that continue them."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for block in blocks:
                for donor in self._index.with_device(block.key):
                    self._index.move(donor, donor.tip, donor.below, block.parent)
                    touched[donor.donor_id] = donor
        self._settle(touched, patient=True)

    def device_moved(self, blocks: Iterable[DeviceBlock]) -> None:
        """The engine offloaded blocks to its own host cache, or brought them back. Chains go from their end."""
        with self._lock:
            found = [donor for block in blocks for donor in self._index.with_device(block.key)]
        self._settle({donor.donor_id: donor for donor in found}, patient=True)

    def device_unknown(self) -> list[DonorId]:
        """Nothing is known of the device any more: donors are where our own tiers have them. Returns those that are
        nowhere, which are left to the caller."""
        with self._lock:
            known = [donor for donor in self._donors.values() if donor.device is not None and not donor.by_engine]
            for donor in known:
                self._index.move(donor, donor.tip, donor.below, None)
            nowhere = [donor.donor_id for donor in self._donors.values() if donor.by_engine or not donor.blocks]
        self._settle({donor.donor_id: donor for donor in known if donor.blocks})
        return nowhere

    def withdraw(self, donor_ids: Iterable[DonorId], why: str) -> None:
        """Donors that nobody vouches for any more."""
        gone = []
        with self._lock:
            for donor_id in donor_ids:
                donor = self._donors.get(donor_id)
                if donor is not None:
                    self._drop(donor)
                    gone.append(donor)
        for donor in gone:
            self.counts[why] += 1
            self._emit_evicted(donor)

    def cut_to(self, donor_id: DonorId, device: DeviceBlock) -> None:
        """A donor of the device tier is there up to this block, say the engine's events, and no further."""
        with self._lock:
            donor = self._donors.get(donor_id)
            if donor is None or not donor.by_engine:
                return
            self._index.move(donor, None, None, device)
        self._settle({donor.donor_id: donor})

    @property
    def due(self) -> float:
        """When `tell_due` has something to tell; infinite: never, as things are."""
        restate = self._restated_at + RESTATE_PAUSE_SECONDS if self._unstated else math.inf
        return min(restate, next(iter(self._changing.values()), math.inf) + SHRINK_SECONDS)

    def tell_due(self) -> None:
        """What waited for its time: donors that shrank, and those of a restatement that the bus has room for now."""
        self.tell_shrunk()
        self._restate()

    def _restate(self) -> None:
        self._restated_at = self._clock()
        while self._unstated and self._stream.has_room:
            self._announce(self._donors[next(iter(self._unstated))])

    def tell_shrunk(self) -> None:
        """Of donors that have been shorter for SHRINK_SECONDS, what is left."""
        due = self._clock() - SHRINK_SECONDS
        late = [donor_id for donor_id, since in self._changing.items() if since <= due]
        for donor_id in late:
            del self._changing[donor_id]
        if late:
            self._settle({donor_id: self._donors[donor_id] for donor_id in late})

    def reset(self, generation: Generation, *, resident: bool) -> None:
        """A new life of the stream. `resident`: the blocks are still here and events were lost, so everything is
        registered again, as fast as the bus takes it; otherwise the cache itself was reset and nothing is left."""
        with self._lock:
            self._generation = generation
            self._unstated = dict.fromkeys(self._donors) if resident else {}
            if not resident:
                self._donors.clear()
                self._index.clear()
                self._changing.clear()
            self.counts["resets"] += 1
        self._stream.reset(generation)
        self._restate()

    # inside

    def _register(
        self,
        namespace: CacheNamespace,
        digest: bytes,
        tokens: bytes,
        chain: list[BlockKey],
        *,
        tip: BlockEntry | None = None,
        below: DiskBlock | None = None,
    ) -> DonorId | None:
        if len(chain) * self._tokens_per_block < self._min_tokens:
            self.counts["too_short"] += 1
            return None
        with self._lock:
            same = self._index.at_end(chain[-1])
            if same is not None:
                self._donors.move_to_end(same.donor_id)
                self.counts["repeated"] += 1
                if tip is not None and tip.ordinal >= same.in_slab:
                    self._index.move(same, tip, same.below, same.device)
        if same is not None:
            self._settle({same.donor_id: same})
            return same.donor_id
        donor_id = new_donor_id()
        by_engine = tip is None and below is None
        device = None if by_engine else self._tiers.on_device(chain[-1])
        tier = tier_of(len(chain), tip, device, by_engine=by_engine)
        event = self._describe(donor_id, namespace, digest, tokens, chain, tier)
        if event is None:
            return None
        donor = Donor(
            donor_id, namespace, digest, chain[-1], len(chain), tip, below, device, by_engine, event, len(chain)
        )
        self._enter(donor, chain)
        self.counts["registered"] += 1
        self._announce(donor)
        return donor_id

    def _enter(self, donor: Donor, chain: list[BlockKey]) -> None:
        """Takes the donor in, and takes those out whose prompts its own continues, and the oldest where there are too
        many."""
        with self._lock:
            older = self._index.ends_in(chain)
            for found in older:
                self._drop(found)
            crowded = []
            while len(self._donors) >= self._max:
                oldest = next(iter(self._donors.values()))
                self._drop(oldest)
                crowded.append(oldest)
            self._donors[donor.donor_id] = donor
            self._index.enter(donor)
        self.counts["superseded"] += len(older)
        self.counts["crowded_out"] += len(crowded)
        for found in (*older, *crowded):
            self._emit_evicted(found)

    def _drop(self, donor: Donor) -> None:
        self._donors.pop(donor.donor_id, None)
        self._changing.pop(donor.donor_id, None)
        self._unstated.pop(donor.donor_id, None)
        self._index.leave(donor)

    def _describe(
        self,
        donor_id: DonorId,
        namespace: CacheNamespace,
        digest: bytes,
        tokens: bytes,
        chain: list[BlockKey],
        tier: Tier,
    ) -> DonorRegistered | None:
        here = WorkerLocation(worker_id=self._stream.worker_id, dp_rank=self._stream.dp_rank, tier=tier)
        event = describe(donor_id, namespace, digest, tokens, chain, here, self._generation)
        if event is None:
            self.counts["invalid"] += 1
        return event

    def _settle(self, donors: dict[DonorId, Donor], *, patient: bool = False) -> None:
        """Tells what became of donors that lost blocks or have them elsewhere now. `patient`: more of the same, or its
        contrary, is likely at once; donors of the engine's cache alone do not wait, since nothing else serves them."""
        for donor in donors.values():
            waits = patient and not donor.by_engine
            left = donor.blocks / donor.registered_blocks
            chain = donor.chain()
            if left < KEPT_SHARE or donor.blocks * self._tokens_per_block < self._min_tokens or not chain:
                if left == 1 and not chain:
                    continue  # of the device tier, and nobody has spoken of its blocks
                with self._lock:
                    self._drop(donor)
                self.counts["evicted"] += 1
                self._emit_evicted(donor)
            elif left < 1 - TOLERATED_LOSS and waits:
                self._changing.setdefault(donor.donor_id, self._clock())
            elif left < 1 - TOLERATED_LOSS:
                tokens = b"".join(block.tokens for block in chain)
                keys = [block.key for block in chain]
                event = self._describe(donor.donor_id, donor.namespace, donor.digest, tokens, keys, donor.tier)
                if event is not None:
                    donor.event, donor.registered_blocks = event, len(chain)
                    self.counts["shrunk"] += 1
                    self._announce(donor)
            elif (said := donor.event.location.tier) is donor.tier:
                continue
            elif waits and Tier.DEVICE in (said, donor.tier):
                self._changing.setdefault(donor.donor_id, self._clock())
            else:
                donor.event = moved(donor.event, donor.tier)
                self.counts["moved"] += 1
                self._announce(donor)

        self.tell_shrunk()

    def _announce(self, donor: Donor) -> None:
        if donor.event.provider_generation != self._generation:
            donor.event = with_generation(donor.event, self._generation)
        self._unstated.pop(donor.donor_id, None)
        if self._sent(self._stream.emit(donor.event)) is not Sent.TOO_LARGE:
            donor.said_in = self._generation
            return
        with self._lock:
            self._drop(donor)
        self.counts["unstorable"] += 1
        self._emit_evicted(donor)

    def _emit_evicted(self, donor: Donor) -> None:
        if donor.said_in != self._generation:
            return  # nobody was told of it since the last reset
        self._sent(self._stream.emit(DonorEvicted(donor_id=donor.donor_id, provider_generation=self._generation)))

    def _sent(self, sent: Sent) -> Sent:
        if sent is Sent.LOST:
            self.counts["unsent"] += 1
        return sent
