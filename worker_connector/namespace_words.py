"""A cache namespace in words, as it stands in a block's file, so that a later process can say whose block it is."""

from __future__ import annotations

import msgspec

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import CacheNamespace

_MAX_BYTES = 16 * 1024


def words_of(namespace: CacheNamespace) -> bytes:
    """Holds the tenant's digest, never its salt."""
    words = msgspec.json.encode(namespace)
    return words if len(words) <= _MAX_BYTES else b""


def namespace_of(words: bytes, digest: bytes) -> CacheNamespace | None:
    """None where the words are missing, or not those of this digest: then nobody is told of the block, and who asks with its namespace
    still finds it."""
    try:
        namespace = msgspec.json.decode(words, type=CacheNamespace)
    except (msgspec.DecodeError, ContractError, UnicodeDecodeError):
        return None
    return namespace if namespace.digest() == digest else None
