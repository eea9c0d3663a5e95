"""Catalog donors made by hand, for tests that need no events."""

from __future__ import annotations

from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.evidence.donor import CatalogDonor, Epoch, StreamKey
from tests.evidence.documents import BLOCK, sketch_of

EPOCH = Epoch("g1")


def donor(
    donor_id: str, tokens: TokenArray, where: CacheNamespace, *, worker: int = 1, epoch: Epoch = EPOCH
) -> CatalogDonor:
    return CatalogDonor(
        donor_id=donor_id,
        namespace_digest_hex=where.digest().hex(),
        location=WorkerLocation(worker, 0, Tier.HOST_PINNED),
        token_count=len(tokens),
        sketch=sketch_of(tokens, where),
        stream=StreamKey(worker, 0),
        epoch=epoch,
        tokens_per_block=BLOCK,
    )
