"""DonorRegistry: which earlier prompts of this replica others may be sent to, and the events that say so.

A donor is a prompt (with what was generated) whose KV is here: resident in the slab, or on the disk below it, or, with materialization off,
on the device as far as the engine's own cache keeps it. It carries a DonorSketch, never tokens. All work is done on the background thread,
none on the scheduler's; only `get` may be called from elsewhere.

Blocks leave every tier from the end of a chain, so a donor is indexed under its last block only. As blocks leave, it shrinks to what is
still there: it stays as it is while little is missing, is registered again, shorter, when more than an eighth is, and is evicted when less
than half is left. Of the slab's it is told to be shorter a second later: a chain that begins to leave has most often left by then, and
one event says so instead of two. So, but for that second, evidence overstates a donor by an eighth at the most, and pressure on the
slab does not become a storm of events.

Its tier is that of the slab while no more than an eighth of it is on disk alone; else it is registered again under the disk's, and once
more when its blocks were brought up.
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
from worker_connector.block import BlockEntry
from worker_connector.device_blocks import DeviceBlock
from worker_connector.disk_index import DiskBlock
from worker_connector.donor import KEPT_SHARE, TOLERATED_LOSS, Donor, KnownDonor, last_of, tip_key
from worker_connector.donor_event import describe, moved, with_generation
from worker_connector.donor_stream import DonorStream, Sent
from worker_connector.request_view import unpack_tokens

RESTATE_PAUSE_SECONDS = 0.02
"""Between two looks for room while everything is registered anew."""
SHRINK_SECONDS = 1.0
"""How long a donor may be shorter than it was said to be."""


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
    ) -> None:
        self._stream = stream
        self._generation = generation
        self._tokens_per_block = tokens_per_block
        self._min_tokens = max(min_donor_tokens, tokens_per_block)
        self._max = max_donors
        self._lock = threading.Lock()
        self._donors: OrderedDict[DonorId, Donor] = OrderedDict()
        self._clock = clock
        self._shrinking: dict[DonorId, float] = {}
        """Shorter than they were said to be, and since when; oldest first."""
        self._unstated: dict[DonorId, None] = {}
        """Not said in this generation yet, in the order in which they are."""
        self._restated_at = 0.0
        self._by_end: dict[BlockKey, Donor] = {}
        self._by_tip: dict[BlockKey, dict[DonorId, Donor]] = {}
        """Donors that go on below the slab, under their last block in it; under the namespace's root if none is."""
        self.on_disk: Callable[[BlockKey], DiskBlock | None] = lambda key: None
        self.in_slab: Callable[[BlockKey], BlockEntry | None] = lambda key: None
        """What the tiers hold now; asked without a lock."""
        self.counts: Counter[str] = Counter()
        """`registered`, `repeated`, `superseded`, `too_short`, `shrunk`, `moved` (between slab and disk), `restored` (from disk, of an
        earlier life), `evicted`, `crowded_out`, `resets`, `unsent`, `unstorable` (larger than the broker takes),
        `invalid`, `unvouched`, `doubtful`."""

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
        """The chain that ends in `end` was left on disk by an earlier life. What of it was brought up meanwhile is looked up."""
        at: DiskBlock | None = end
        while at is not None and not at.usable:
            at = at.parent  # blocks that left before this job ran
        if at is None:
            return None
        path = at.chain()
        tip = None
        for block in path:
            entry = self.in_slab(block.key)
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
        """Blocks left the slab, deepest first. What is on disk is there still."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for entry in entries:
                parent = entry.parent if entry.parent is not None and entry.parent.ordinal >= 0 else None
                for donor in list(self._by_tip.get(entry.key, {}).values()):
                    self._move_tip(donor, parent)
                    touched[donor.donor_id] = donor
                donor_here = self._by_end.get(entry.key)
                if donor_here is None or donor_here.tip is None or donor_here.tip.key != entry.key:
                    continue
                touched[donor_here.donor_id] = donor_here
                below = self.on_disk(entry.key)
                if below is not None:
                    donor_here.below = below
                    self._move_tip(donor_here, parent)
                else:
                    donor_here.tip = parent
                    self._move_end(donor_here, parent)
        self._settle(touched, patient=True)

    def stored(self, entries: Sequence[BlockEntry]) -> None:
        """Consecutive blocks of a chain became resident: donors that went on below the slab there have them back."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            first = entries[0]
            above = root_key(first.digest) if first.ordinal == 0 or first.parent is None else first.parent.key
            for donor in list(self._by_tip.get(above, {}).values()):
                tip = last_of(donor.below, entries)
                if tip is None:
                    continue
                self._move_tip(donor, tip)
                touched[donor.donor_id] = donor
        self._settle(touched)

    def disk_gone(self, blocks: Iterable[DiskBlock]) -> None:
        """Blocks left the disk, deepest first."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for block in blocks:
                donor = self._by_end.get(block.key)
                if donor is None or donor.below is None:
                    continue
                touched[donor.donor_id] = donor
                donor.below = block.parent
                self._move_end(donor, block.parent)
                if donor.below is not None and donor.below.ordinal < donor.in_slab:
                    donor.below = None
                if donor.below is None:
                    self._leave_tip(donor)
        self._settle(touched)

    def device_gone(self, blocks: Iterable[DeviceBlock]) -> None:
        """The engine says that it removed blocks from its own cache; deepest first, with all that continue them."""
        touched: dict[DonorId, Donor] = {}
        with self._lock:
            for block in blocks:
                donor = self._by_end.get(block.key)
                if donor is None or not donor.by_engine:
                    continue
                touched[donor.donor_id] = donor
                donor.device = block.parent
                self._move_end(donor, block.parent)
        self._settle(touched)

    def device_moved(self, blocks: Iterable[DeviceBlock]) -> None:
        """The engine offloaded blocks to its own host cache, or brought them back. Chains go from their end."""
        with self._lock:
            found = [
                donor for block in blocks if (donor := self._by_end.get(block.key)) is not None and donor.by_engine
            ]
        self._settle({donor.donor_id: donor for donor in found})

    def withdraw(self, donor_ids: Iterable[DonorId], why: str) -> None:
        """Donors of the device tier that nobody vouches for any more."""
        gone = []
        with self._lock:
            for donor_id in donor_ids:
                donor = self._donors.get(donor_id)
                if donor is not None and donor.by_engine:
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
            donor.device = device
            if donor.end_key != device.key:
                self._move_end(donor, device)
        self._settle({donor.donor_id: donor})

    @property
    def due(self) -> float:
        """When `tell_due` has something to tell; infinite: never, as things are."""
        restate = self._restated_at + RESTATE_PAUSE_SECONDS if self._unstated else math.inf
        return min(restate, next(iter(self._shrinking.values()), math.inf) + SHRINK_SECONDS)

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
        late = [donor_id for donor_id, since in self._shrinking.items() if since <= due]
        for donor_id in late:
            del self._shrinking[donor_id]
        if late:
            self._settle({donor_id: self._donors[donor_id] for donor_id in late})

    def device_donors(self) -> list[DonorId]:
        with self._lock:
            return [donor.donor_id for donor in self._donors.values() if donor.by_engine]

    def reset(self, generation: Generation, *, resident: bool) -> None:
        """A new life of the stream. `resident`: the blocks are still here and events were lost, so everything is registered again, as fast
        as the bus takes it; otherwise the cache itself was reset and nothing is left."""
        with self._lock:
            self._generation = generation
            self._unstated = dict.fromkeys(self._donors) if resident else {}
            if not resident:
                self._donors.clear()
                self._by_end.clear()
                self._by_tip.clear()
                self._shrinking.clear()
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
            same = self._by_end.get(chain[-1])
            if same is not None:
                self._donors.move_to_end(same.donor_id)
                self.counts["repeated"] += 1
                if same.below is not None and tip is not None and tip.ordinal >= same.in_slab:
                    self._move_tip(same, tip)
        if same is not None:
            self._settle({same.donor_id: same})
            return same.donor_id
        donor_id = new_donor_id()
        in_slab = 0 if tip is None else tip.ordinal + 1
        by_engine = tip is None and below is None
        tier = Tier.DEVICE if by_engine else Tier.HOST_PINNED
        if below is not None and in_slab < len(chain) * (1 - TOLERATED_LOSS):
            tier = Tier.DISK
        event = self._describe(donor_id, namespace, digest, tokens, chain, tier)
        if event is None:
            return None
        donor = Donor(
            donor_id, namespace, digest, chain[-1], len(chain), tip, below, None, by_engine, event, len(chain)
        )
        with self._lock:
            older = [found for key in chain if (found := self._by_end.get(key)) is not None]
            for found in older:
                self._drop(found)
            crowded = []
            while len(self._donors) >= self._max:
                oldest = next(iter(self._donors.values()))
                self._drop(oldest)
                crowded.append(oldest)
            self._donors[donor_id] = donor
            self._by_end[donor.end_key] = donor
            if below is not None:
                self._by_tip.setdefault(tip_key(donor), {})[donor_id] = donor
        for found in older:
            self.counts["superseded"] += 1
            self._emit_evicted(found)
        for found in crowded:
            self.counts["crowded_out"] += 1
            self._emit_evicted(found)
        self.counts["registered"] += 1
        self._announce(donor)
        return donor_id

    def _move_tip(self, donor: Donor, tip: BlockEntry | None) -> None:
        """Its part in the slab now ends here; what is on disk ends where it did."""
        self._leave_tip(donor)
        donor.tip = tip
        if donor.below is not None and donor.in_slab > donor.below.ordinal:
            donor.below = None
        if donor.below is not None:
            self._by_tip.setdefault(tip_key(donor), {})[donor.donor_id] = donor

    def _leave_tip(self, donor: Donor) -> None:
        there = self._by_tip.get(tip_key(donor))
        if there is not None:
            there.pop(donor.donor_id, None)
            if not there:
                del self._by_tip[tip_key(donor)]

    def _move_end(self, donor: Donor, end: BlockEntry | DiskBlock | DeviceBlock | None) -> None:
        """Its last block is gone, and this one is the last now; `blocks` 0: nothing is left, or another donor says the same."""
        if self._by_end.get(donor.end_key) is donor:
            del self._by_end[donor.end_key]
        if end is None or end.key in self._by_end:
            donor.blocks = 0
            return
        donor.blocks = end.ordinal + 1
        donor.end_key = end.key
        self._by_end[end.key] = donor

    def _drop(self, donor: Donor) -> None:
        self._donors.pop(donor.donor_id, None)
        self._shrinking.pop(donor.donor_id, None)
        self._unstated.pop(donor.donor_id, None)
        if self._by_end.get(donor.end_key) is donor:
            del self._by_end[donor.end_key]
        self._leave_tip(donor)

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
        """Tells what became of donors that lost blocks or have them elsewhere now; `patient`: more of the same is likely at once."""
        for donor in donors.values():
            left = donor.blocks / donor.registered_blocks
            chain = donor.chain()
            if left < KEPT_SHARE or donor.blocks * self._tokens_per_block < self._min_tokens or not chain:
                if left == 1 and not chain:
                    continue  # of the device tier, and nobody has spoken of its blocks
                with self._lock:
                    self._drop(donor)
                self.counts["evicted"] += 1
                self._emit_evicted(donor)
            elif left < 1 - TOLERATED_LOSS and patient:
                self._shrinking.setdefault(donor.donor_id, self._clock())
            elif left < 1 - TOLERATED_LOSS:
                tokens = b"".join(block.tokens for block in chain)
                keys = [block.key for block in chain]
                event = self._describe(donor.donor_id, donor.namespace, donor.digest, tokens, keys, donor.tier)
                if event is not None:
                    donor.event, donor.registered_blocks = event, len(chain)
                    self.counts["shrunk"] += 1
                    self._announce(donor)
            elif donor.event.location.tier is not donor.tier:
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
