"""Encodes a cache namespace as JSON (`words`), as it stands in a block's file, so that a later process knows whose
block it is."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import CacheNamespace

_MAX_BYTES = 16 * 1024
_KNOWN = 4_096


def words_of(namespace: CacheNamespace) -> bytes:
    """Empty where it would exceed 16 KiB. It has the tenant's digest, never its salt."""
    words = msgspec.json.encode(namespace)
    return words if len(words) <= _MAX_BYTES else b""


def namespace_of(words: bytes, digest: bytes) -> CacheNamespace | None:
    """None where the words are missing, or not those of this digest: then the block is published to nobody, but a
    request with its namespace still finds it."""
    try:
        namespace = msgspec.json.decode(words, type=CacheNamespace)
    except (msgspec.DecodeError, ContractError, UnicodeDecodeError):
        return None
    return namespace if namespace.digest() == digest else None


class KnownWords:
    """Encoded namespaces of the blocks that were seen last. Not thread-safe: the leader's lock covers it."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[bytes, bytes] = OrderedDict()

    def met(self, digest: bytes, namespace: CacheNamespace) -> None:
        """Notes the namespace of a block that became resident."""
        if digest in self._by_digest:
            self._by_digest.move_to_end(digest)
        else:
            self._keep(digest, words_of(namespace))

    def told(self, digest: bytes, words: bytes) -> None:
        """Notes an encoded namespace that stands in a block's file."""
        if words and digest not in self._by_digest:
            self._keep(digest, words)

    def get(self, digest: bytes) -> bytes:
        """Empty: not known."""
        return self._by_digest.get(digest, b"")

    def all(self) -> dict[bytes, bytes]:
        """All that are known, by digest; a copy."""
        return dict(self._by_digest)

    def _keep(self, digest: bytes, words: bytes) -> None:
        self._by_digest[digest] = words
        if len(self._by_digest) > _KNOWN:
            self._by_digest.popitem(last=False)
