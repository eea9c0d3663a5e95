"""A tape of donor events as one emitter would send them: numbered, in one generation at a time, ready to be cut,
doubled or shuffled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    SCHEMA_VERSION,
    DonorEvent,
    DonorEventData,
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorSegment,
    DonorsPurged,
    GenerationReset,
    PurgeScope,
    WireNamespace,
)
from dynamo_semkv.contracts.keys import TokenArray, block_keys
from dynamo_semkv.contracts.location import Location, Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch


class EventTape:
    """Every method that makes an event appends it to the tape and returns it; iterate for the whole tape. The tape
    starts empty: call `reset()` first for an emitter that announces its generation, as ours does."""

    def __init__(self, worker_id: int = 1, dp_rank: int = 0, generation: int | str = "g1") -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.generation = generation
        self.events: list[DonorEvent] = []
        self._next_id = 0

    def __iter__(self) -> Iterator[DonorEvent]:
        return iter(self.events)

    def restart(self, generation: int | str, *, announce: bool = True) -> EventTape:
        """Starts a new process under the same identity: ids count from 0. `announce=False`: without a reset event, as
        SemBlend does."""
        self.generation = generation
        self._next_id = 0
        if announce:
            self.reset(generation)
        return self

    def reset(self, generation: int | str | None = None) -> DonorEvent:
        """The emitter announces a generation: `generation`, or its present one."""
        if generation is not None:
            self.generation = generation
        return self._record(GenerationReset(generation=self.generation))

    def register(
        self,
        donor_id: str,
        tokens: TokenArray,
        namespace: CacheNamespace,
        *,
        location: Location | None = None,
        cuts: Sequence[int] = (),
        sketch: bytes | None = None,
        ttl: float | None = None,
    ) -> DonorEvent:
        """Registers a prompt as donor. `cuts` are token positions at which it is split into segments 0, 1, ...; the
        first segment carries the sketch (None: made from the tokens). `ttl` is in seconds."""
        digest = namespace.digest()
        block = namespace.tokens_per_block or 1
        if sketch is None:
            sketch = DonorSketch.of(tokens, digest, block_keys(digest, tokens, block)).to_bytes()
        edges = [0, *cuts, len(tokens)]
        segments = [
            DonorSegment(
                segment_id=i, token_range=(edges[i], edges[i + 1]), digest=0, provider_metadata=None if i else sketch
            )
            for i in range(len(edges) - 1)
        ]
        wire = WireNamespace(
            model=namespace.model or "",
            tokenizer=namespace.tokenizer or "",
            kv_layout=namespace.kv_layout or "",
            block_size=block,
            extra={NAMESPACE_DIGEST_EXTRA: digest.hex()},
        )
        return self.register_wire(donor_id, len(tokens), wire, segments, location=location, ttl=ttl)

    def register_wire(
        self,
        donor_id: str,
        token_count: int,
        namespace: WireNamespace,
        segments: list[DonorSegment],
        *,
        location: Location | None = None,
        ttl: float | None = None,
    ) -> DonorEvent:
        """Registers a donor with a namespace and segments as given; the location defaults to this worker's host
        memory."""
        return self._record(
            DonorRegistered(
                donor_id=donor_id,
                namespace=namespace,
                location=location if location is not None else self.here(Tier.HOST_PINNED),
                token_count=token_count,
                segments=segments,
                provider_generation=self.generation,
                ttl=ttl,
            )
        )

    def here(self, tier: Tier) -> WorkerLocation:
        """This worker and rank, at a tier."""
        return WorkerLocation(self.worker_id, self.dp_rank, tier)

    def evict(self, donor_id: str, segments: list[int | str] | None = None) -> DonorEvent:
        """The donor is gone, or only the segments that are named."""
        return self._record(DonorEvicted(donor_id=donor_id, provider_generation=self.generation, segments=segments))

    def relocate(self, donor_id: str, location: Location) -> DonorEvent:
        """The donor's blocks are elsewhere now."""
        return self._record(
            DonorRelocated(donor_id=donor_id, new_location=location, provider_generation=self.generation)
        )

    def purge(self, scope: PurgeScope) -> DonorEvent:
        """All donors within `scope` are gone."""
        return self._record(DonorsPurged(scope=scope, provider_generation=self.generation))

    def skip(self, events: int = 1) -> None:
        """Uses up event ids, as of events that got lost."""
        self._next_id += events

    def _record(self, data: DonorEventData) -> DonorEvent:
        event = DonorEvent(
            schema_version=SCHEMA_VERSION,
            event_id=self._next_id,
            worker_id=self.worker_id,
            dp_rank=self.dp_rank,
            data=data,
        )
        self._next_id += 1
        self.events.append(event)
        return event
