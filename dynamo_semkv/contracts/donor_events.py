"""Donor lifecycle events on `semantic-kv-events`, schema 1 (ai-dynamo/dynamo#10127; SemBlend 0.3.25 emits the same).

Rules of a consumer:
* another `schema_version` is dropped and counted, never parsed on a best effort;
* `event_id` is monotonic per stream `(worker_id, dp_rank)` of the *emitter* and starts at 0: below the cursor is a
  duplicate, above it is a gap, and the donors of a stream with a gap get no credit until a reset or resync;
* unknown fields are ignored on reading, and nothing here re-encodes a foreign event, so no hop of ours can drop one;
* events carry no tokens and no text.

Our emitter puts `stable_worker_id(stable_routing_id)` where the format wants a worker id, because an engine does not
know its Dynamo instance id.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_semkv.contracts.location import Location

SCHEMA_VERSION = 1
MAX_SEGMENTS = 256
MAX_EVENT_BYTES = 256 * 1024
NAMESPACE_DIGEST_EXTRA = "semkv_namespace"
"""Key in `namespace.extra` under which our donors carry the hex digest of their full CacheNamespace."""


class WireNamespace(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The hard key of the wire format. A field that is there on one side only is a mismatch, `extra` included.

    From `model_revision` on: what SemBlend's TensorRT-LLM emitter adds. They are read because donors that differ in one
    of them hold other KV; ignoring them would put both into one partition.
    """

    model: str
    tokenizer: str
    kv_layout: str
    block_size: int
    lora: str | None = None
    quant: str | None = None
    extra: dict[str, str] = msgspec.field(default_factory=dict)
    model_revision: str = ""
    tokenizer_revision: str = ""
    kv_dtype: str = ""
    cache_dtype: str = ""
    quantization: str = ""
    adapter: str = ""
    rope_config: dict[str, Any] = msgspec.field(default_factory=dict)
    tensor_parallel: dict[str, Any] = msgspec.field(default_factory=dict)
    backend_cache_layout: str = ""


class DonorSegment(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A part of a donor that can be evicted by itself."""

    segment_id: int | str
    token_range: tuple[int, int]
    """Half-open `[start, end)` in donor tokens."""
    digest: int
    """u64 over the token ids: integrity only, never identity."""
    block_hashes: list[int] | None = None
    """Of emitters that have them. Ours leaves them out: an engine's hashes have 64 bits and cover neither model, layout
    nor adapter, so they prove nothing, and some versions give connectors none. What is proven is so by the block keys
    in the sketch."""
    provider_metadata: list[int] | bytes | None = None
    """Opaque bytes; a list of integers in JSON. Ours carry a `DonorSketch` (contracts/sketch.py), SemBlend's
    little-endian f32."""


class DonorRegistered(
    msgspec.Struct, frozen=True, tag_field="kind", tag="donor_registered", omit_defaults=True, kw_only=True
):
    """A donor is there, or there again at another place; the same id replaces what was said before."""

    donor_id: str
    namespace: WireNamespace
    location: Location
    token_count: int
    segments: list[DonorSegment]
    provider_generation: int | str
    ttl: float | None = None
    """Seconds for which this holds, from when it was stored, unless it is said again; absent: the emitter does not say.
    Ours says everything again three times in that span."""


class DonorEvicted(
    msgspec.Struct, frozen=True, tag_field="kind", tag="donor_evicted", omit_defaults=True, kw_only=True
):
    """A donor, or some of its segments, is gone."""

    donor_id: str
    provider_generation: int | str
    segments: list[int | str] | None = None
    """Segment ids; absent = the whole donor."""


class DonorRelocated(msgspec.Struct, frozen=True, tag_field="kind", tag="donor_relocated", kw_only=True):
    """In SemBlend's types, not in the draft: there a donor moves by registering its id again with a new location."""

    donor_id: str
    new_location: Location
    provider_generation: int | str


class PurgeWorker(msgspec.Struct, frozen=True, tag_field="kind", tag="worker"):
    """All donors of one worker."""

    worker_id: int


class PurgeLocation(msgspec.Struct, frozen=True, tag_field="kind", tag="location"):
    """All donors at one place."""

    location: Location


class PurgeAll(msgspec.Struct, frozen=True, tag_field="kind", tag="all"):
    """Everything that this emitter may speak for; never another worker's donors."""


PurgeScope = PurgeWorker | PurgeLocation | PurgeAll


class DonorsPurged(msgspec.Struct, frozen=True, tag_field="kind", tag="donors_purged", kw_only=True):
    """All donors of a scope are gone."""

    scope: PurgeScope
    provider_generation: int | str


class GenerationReset(msgspec.Struct, frozen=True, tag_field="kind", tag="provider_generation_reset", kw_only=True):
    """Everything of this stream before it is gone; `event_id` may start again at any value, usually 0."""

    generation: int | str


DonorEventData = DonorRegistered | DonorEvicted | DonorRelocated | DonorsPurged | GenerationReset


class DonorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; a stream is one (worker, rank), and `event_id` counts up by one in it."""

    schema_version: int
    event_id: int
    worker_id: int
    dp_rank: int
    data: DonorEventData
