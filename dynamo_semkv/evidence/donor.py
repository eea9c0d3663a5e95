"""CatalogDonor: one registered donor, and the life that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_semkv.contracts.location import Location
from dynamo_semkv.contracts.sketch import DonorSketch


class StreamKey(NamedTuple):
    """An emitter's event stream: the worker id as the wire gives it, and the data-parallel rank."""

    worker_id: int
    dp_rank: int


class Life:
    """One generation of one stream, shared by all its donors: purging, quarantining or fencing off any number of donors is one
    assignment, seen at once by every thread that holds one of them."""

    __slots__ = ("creditable", "generation", "over")

    def __init__(self, generation: str) -> None:
        self.generation = generation
        self.creditable = True
        """False: quarantined after a gap, absent with its worker, or over."""
        self.over = False
        """For good: a reset or a purge ended it."""

    def end(self) -> None:
        self.creditable = False
        self.over = True


def _nobody(_: str) -> None:
    """Where no catalog keeps the donor."""


@dataclass(frozen=True, slots=True)
class CatalogDonor:
    donor_id: str
    namespace_digest_hex: str
    """Hex digest of the full CacheNamespace; `wire:...` for donors of other emitters, which no request's digest can equal."""
    location: Location
    token_count: int
    sketch: DonorSketch | None
    """None for donors of other emitters: they give no fingerprint evidence."""
    stream: StreamKey
    life: Life = field(repr=False)
    tokens_per_block: int = 1
    segments: tuple[tuple[int | str, int, int], ...] = ()
    """(segment id, start, end) of what is still there, in order, half-open; `sketch` covers no more than these."""
    on_use: Callable[[str], None] = field(default=_nobody, repr=False, compare=False)

    @property
    def generation(self) -> str:
        return self.life.generation

    @property
    def creditable(self) -> bool:
        """Read it last, right before a match is handed out: it may turn False at any moment."""
        return self.life.creditable

    def used(self) -> None:
        """A provider made a match of it: its turn to be evicted comes later. Any thread."""
        self.on_use(self.donor_id)
