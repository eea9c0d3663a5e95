"""Token documents for the evidence tests: Zipf-like, so that common words repeat as in real text, and seeded."""

from __future__ import annotations

import numpy as np

from dynamo_semkv.contracts.keys import TokenArray, block_keys
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch
from dynamo_semkv.evidence.provider import LookupQuery

BLOCK = 32


def namespace(tenant: str | None = "", **fields: str) -> CacheNamespace:
    """Fully known unless a field is given as None."""
    known: dict[str, str | None] = {**dict.fromkeys(CacheNamespace.__struct_fields__, "x"), **fields, "tenant": tenant}
    del known["tokens_per_block"], known["multimodal"]
    return CacheNamespace(**known, tokens_per_block=BLOCK, multimodal=())  # type: ignore[arg-type]


def document(seed: int, tokens: int, vocabulary: int = 20_000) -> TokenArray:
    """Shape [tokens]. Two seeds share no more n-grams than chance gives."""
    rng = np.random.default_rng(seed)
    ranks = rng.zipf(1.2, size=4 * tokens + 64)
    return ranks[ranks < vocabulary][:tokens].astype(np.uint32)


def joined(*parts: TokenArray) -> TokenArray:
    return np.concatenate(parts).astype(np.uint32)


def edited(tokens: TokenArray, every: int, seed: int = 0) -> TokenArray:
    """The same document with one token in `every` replaced by one that it did not have there."""
    rng = np.random.default_rng(seed)
    changed = tokens.copy()
    at = np.arange(every // 2, len(tokens), every)
    changed[at] += rng.integers(1, 1_000, size=len(at)).astype(np.uint32)
    return changed


def query_of(tokens: TokenArray, where: CacheNamespace) -> LookupQuery:
    digest = where.digest()
    return LookupQuery(tokens, where, digest, block_keys(digest, tokens, BLOCK))


def sketch_of(tokens: TokenArray, where: CacheNamespace) -> DonorSketch:
    digest = where.digest()
    return DonorSketch.of(tokens, digest, block_keys(digest, tokens, BLOCK))
