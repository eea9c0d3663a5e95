"""CatalogDonor: one registered donor, and the epoch that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar, cast

import msgspec

from dynamo_semkv.contracts.location import Location
from dynamo_semkv.contracts.sketch import DonorSketch

T = TypeVar("T", bound=Hashable)
MAX_INTERNED = 1_024
"""Of one epoch: the tiers and shared places of a rank, tenants that are active on it."""


class StreamKey(NamedTuple):
    """An emitter's event stream: the worker id as the wire gives it, and the data-parallel rank."""

    worker_id: int
    dp_rank: int


class Epoch:
    """One generation of one stream, shared by all its donors: purging, quarantining or fencing off any number of donors
    is one assignment, seen at once by every thread that holds one of them."""

    __slots__ = ("_interned", "creditable", "generation", "over")

    def __init__(self, generation: str) -> None:
        self.generation = generation
        self._interned: dict[object, object] = {}
        self.creditable = True
        """False: quarantined after a gap, absent with its worker, or over."""
        self.over = False
        """For good: a reset or a purge ended it."""

    def end(self) -> None:
        """Ends the credit of every donor of this epoch, for good."""
        self.creditable = False
        self.over = True

    def interned(self, value: T) -> T:
        """One object for equal values: every event brings its own copy of the partition and of the place. Beyond a few
        not shared."""
        known = self._interned.get(value)
        if known is None and len(self._interned) < MAX_INTERNED:
            self._interned[value] = known = value
        return value if known is None else cast(T, known)


def _nobody(_: str) -> None:
    """`on_use` of a donor that no catalog keeps."""


Segment = tuple[int | str, int, int]
"""(segment id, start, end), half-open."""


class CatalogDonor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Compared by identity. The garbage collector does not look at them: walking a hundred thousand would stop the
    event loop for a tenth of a second. The price: `on_use` leads back to the catalog, so a catalog that is thrown away
    with donors in it is never freed. A process has one.
    """

    donor_id: str
    namespace_digest_hex: str
    """Hex digest of the full CacheNamespace; `wire:...` for donors of other emitters, which no request's digest can
    equal."""
    location: Location
    token_count: int
    sketch: DonorSketch | None
    """None for donors of other emitters: they give no fingerprint evidence."""
    stream: StreamKey
    epoch: Epoch
    tokens_per_block: int = 1
    parts: tuple[Segment, ...] = ()
    """What `segments` is made of; empty for the one segment that nearly every donor has, number 0 over all its
    tokens."""
    ends_at: float = math.inf
    """When it is no longer believed, by the clock of whoever stored its registration."""
    on_use: Callable[[str], None] = _nobody
    slot: int = -1
    """Its number in the catalog, as long as the catalog keeps it."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is still there, in order; `sketch` covers no more than these."""
        return self.parts or ((0, 0, self.token_count),)

    @property
    def generation(self) -> str:
        """The emitter's generation in which the donor was registered."""
        return self.epoch.generation

    @property
    def creditable(self) -> bool:
        """Read it last, right before a match is handed out: it may turn False at any moment."""
        return self.epoch.creditable

    def used(self) -> None:
        """A provider made a match of it, so the catalog evicts it later. Any thread."""
        self.on_use(self.donor_id)


def parts_of(segments: tuple[Segment, ...], token_count: int) -> tuple[Segment, ...]:
    """The segments as CatalogDonor keeps them: empty for a single segment, number 0, over all tokens."""
    return () if segments == ((0, 0, token_count),) else segments
