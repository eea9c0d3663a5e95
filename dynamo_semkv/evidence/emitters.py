"""Which donors an emitter may announce, and how its event becomes a CatalogDonor or is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import msgspec

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorRegistered,
    DonorSegment,
    PurgeLocation,
    PurgeScope,
    PurgeWorker,
    WireNamespace,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.location import Location, SharedLocation
from dynamo_semkv.contracts.sketch import ALGORITHM, DonorSketch, merged_ranges
from dynamo_semkv.evidence.donor import CatalogDonor, Epoch, Segment, StreamKey, parts_of

WIRE_PREFIX = "wire:"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def may_place(emitter: StreamKey, location: Location) -> bool:
    """Whether an emitter may announce donors at this location: on its own worker and rank, or in a shared store. Ranks
    of one worker have caches of their own."""
    if isinstance(location, SharedLocation):
        return True
    return (location.worker_id, location.dp_rank) == emitter


def may_purge(emitter: StreamKey, scope: PurgeScope) -> bool:
    """Whether an emitter may send this purge: of its own worker, of a place that it may name, or of all its donors."""
    if isinstance(scope, PurgeWorker):
        return scope.worker_id == emitter.worker_id
    return may_place(emitter, scope.location) if isinstance(scope, PurgeLocation) else True


def in_scope(donor: CatalogDonor, scope: PurgeScope) -> bool:
    """Whether the purge covers this donor, which is the emitter's own."""
    if isinstance(scope, PurgeLocation):
        return donor.location == scope.location
    return not (isinstance(scope, PurgeWorker) and isinstance(donor.location, SharedLocation))


def partition_of(namespace: WireNamespace) -> str | None:
    """The partition that a donor belongs to; None for a malformed namespace.

    Our emitter sends the digest of the whole CacheNamespace, tenant included. Any other donor (SemBlend's) gets a
    partition of its own made of every field of the wire's hard key, tenant_key included, absent told apart from empty;
    no request's digest can equal it.
    """
    if namespace.block_size < 1:
        return None
    ours = namespace.extra.get(NAMESPACE_DIGEST_EXTRA)
    if ours is not None:
        return ours if _DIGEST.fullmatch(ours) else None
    key = [getattr(namespace, name) for name in namespace.__struct_fields__]
    try:
        encoded = msgspec.json.encode(key, order="sorted")
    except (TypeError, ValueError, RecursionError):
        return None  # a `rope_config` that JSON cannot hold, or that is nested beyond reason
    return WIRE_PREFIX + hashlib.blake2b(encoded, digest_size=32).hexdigest()


def donor_from(
    data: DonorRegistered,
    partition: str,
    emitter: StreamKey,
    epoch: Epoch,
    on_use: Callable[[str], None],
    ends_at: float,
) -> CatalogDonor:
    """Raises ContractError for a sketch that is damaged or describes another donor. Embeddings of other emitters are
    not read."""
    segments: tuple[Segment, ...] = tuple((s.segment_id, *s.token_range) for s in data.segments)
    sketch = None
    if not partition.startswith(WIRE_PREFIX):
        sketch = _sketch_in(data.segments)
        if sketch is not None and sketch.token_count != data.token_count:
            raise ContractError("sketch.token_count", sketch.token_count, f"{data.token_count}, as registered")
    return CatalogDonor(
        donor_id=data.donor_id,
        namespace_digest_hex=epoch.interned(partition),
        location=epoch.interned(data.location),
        token_count=data.token_count,
        sketch=restricted(sketch, data.token_count, segments, data.namespace.block_size),
        stream=emitter,
        epoch=epoch,
        tokens_per_block=data.namespace.block_size,
        parts=parts_of(segments, data.token_count),
        ends_at=ends_at,
        on_use=on_use,
    )


def restricted(
    sketch: DonorSketch | None,
    token_count: int,
    segments: tuple[Segment, ...],
    tokens_per_block: int,
) -> DonorSketch | None:
    """The part of the sketch that the segments still cover."""
    ranges = merged_ranges([(start, end) for _, start, end in segments])
    if sketch is None or ranges == [(0, token_count)]:
        return sketch
    return sketch.within(ranges, tokens_per_block)


def _sketch_in(segments: list[DonorSegment]) -> DonorSketch | None:
    """The sketch of the first segment that has one. It covers the whole donor, whatever the segment's own range."""
    for segment in segments:
        raw = segment.provider_metadata
        if raw is not None and bytes(raw[: len(ALGORITHM)]) == ALGORITHM:
            return DonorSketch.from_bytes(bytes(raw))
    return None
