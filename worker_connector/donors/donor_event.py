"""What is said of one donor: `donor_registered` of the donor event format. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorRegistered,
    DonorSegment,
    WireNamespace,
)
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import DonorId, Generation
from dynamo_semkv.contracts.keys import BlockKey
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch
from worker_connector.engine_api.request_view import unpack_tokens


def describe(
    donor_id: DonorId,
    namespace: CacheNamespace,
    digest: bytes,
    tokens: bytes,
    chain: list[BlockKey],
    location: WorkerLocation,
    generation: Generation,
) -> DonorRegistered | None:
    """`tokens`: packed, of all the blocks in `chain`. None if the format cannot say it."""
    token_count = len(tokens) // 4
    sketch = DonorSketch.of(unpack_tokens(tokens), digest, chain)
    integrity = int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little")
    try:
        return DonorRegistered(
            donor_id=donor_id,
            namespace=wire_namespace(namespace, digest),
            location=location,
            token_count=token_count,
            segments=[
                DonorSegment(
                    segment_id=0,
                    token_range=(0, token_count),
                    digest=integrity,
                    provider_metadata=sketch.to_bytes(),
                )
            ],
            provider_generation=generation,
        )
    except ContractError:
        return None


def with_generation(event: DonorRegistered, generation: Generation) -> DonorRegistered:
    """The same registration in another generation of the cache."""
    return msgspec.structs.replace(event, provider_generation=generation)


def moved(event: DonorRegistered, tier: Tier) -> DonorRegistered:
    """A donor moves by registering its id again with another location."""
    assert isinstance(event.location, WorkerLocation)
    return msgspec.structs.replace(event, location=msgspec.structs.replace(event.location, tier=tier))


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
