"""DonorSketch: what a donor's tokens look like, without the tokens.

The connector computes it off the hot path and ships it in `provider_metadata`; the router's fingerprint provider indexes it and
computes the same for a prompt. Both sides must agree to the bit, so the algorithm is part of the contract and has golden vectors.

Algorithm `ng8m32-1`: every window of 8 tokens is hashed in wrapping u64, `h = key; h = (h * M) ^ (token + i + 1)` for i in 0..7, finalised
as splitmix64 does, and kept when its low 5 bits are zero (1 in 32, by content, so an insertion shifts nothing). Kept: (fingerprint u64,
position u32). The key comes from the namespace digest, so equal text under two tenants has unrelated fingerprints.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import KEY_BYTES, BlockKey, TokenArray

ALGORITHM = b"ng8m32-1"
NGRAM = 8
SAMPLING = 32
MAX_SAMPLES = 4_096
MAX_CHECKPOINTS = 40
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HEADER = struct.Struct("<8sIHI")

U64Array = npt.NDArray[np.uint64]
U32Array = npt.NDArray[np.uint32]


def sketch_key(namespace_digest: bytes) -> int:
    """u64 that keys the hash; a pure function of the namespace (and so of the tenant)."""
    return int.from_bytes(hashlib.blake2b(namespace_digest, digest_size=8, person=b"semkv-sketch").digest(), "little")


def sample(tokens: TokenArray, key: int) -> tuple[U64Array, U32Array]:
    """Fingerprints (u64, shape [m]) and their window starts (u32, shape [m], ascending) of a token array of shape [n].

    m is about (n - 7) / 32 and at most MAX_SAMPLES (the first ones); empty for n < 8. Cost: O(n), no Python loop over tokens.
    """
    n = len(tokens)
    if n < NGRAM:
        return np.empty(0, np.uint64), np.empty(0, np.uint32)
    wide = tokens.astype(np.uint64)
    width = n - NGRAM + 1
    with np.errstate(over="ignore"):
        h = np.full(width, np.uint64(key))
        for i in range(NGRAM):
            h *= _MULTIPLIER
            h ^= wide[i : i + width] + np.uint64(i + 1)
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    keep = np.flatnonzero((h & np.uint64(SAMPLING - 1)) == 0)[:MAX_SAMPLES]
    return h[keep], keep.astype(np.uint32)


class DonorSketch:
    """Fingerprints with positions, the donor's length, and a few block keys that prove an exact prefix.

    `checkpoints`: (ordinal, key) of the block key chain at ordinals 0, 1, 3, 7, ... and the last full block. If the request's own chain
    has the same key at a checkpoint, its first `ordinal + 1` blocks are identical to the donor's.
    """

    __slots__ = ("checkpoints", "fingerprints", "positions", "token_count")

    def __init__(
        self,
        token_count: int,
        fingerprints: U64Array,
        positions: U32Array,
        checkpoints: tuple[tuple[int, BlockKey], ...],
    ) -> None:
        if len(fingerprints) != len(positions) or len(fingerprints) > MAX_SAMPLES:
            raise ContractError("sketch.samples", len(fingerprints), f"equal lengths, at most {MAX_SAMPLES}")
        if len(checkpoints) > MAX_CHECKPOINTS:
            raise ContractError("sketch.checkpoints", len(checkpoints), f"at most {MAX_CHECKPOINTS}")
        self.token_count = token_count
        self.fingerprints = fingerprints
        self.positions = positions
        self.checkpoints = checkpoints

    @classmethod
    def of(cls, tokens: TokenArray, namespace_digest: bytes, chain: list[BlockKey]) -> DonorSketch:
        """`chain`: the block keys of the donor's resident full blocks, in order."""
        fingerprints, positions = sample(tokens, sketch_key(namespace_digest))
        ordinals = sorted({2**i - 1 for i in range(32) if 2**i <= len(chain)} | ({len(chain) - 1} if chain else set()))
        return cls(len(tokens), fingerprints, positions, tuple((o, chain[o]) for o in ordinals))

    def to_bytes(self) -> bytes:
        parts = [_HEADER.pack(ALGORITHM, self.token_count, len(self.checkpoints), len(self.fingerprints))]
        parts += [struct.pack("<I", ordinal) + key for ordinal, key in self.checkpoints]
        parts += [self.fingerprints.astype("<u8").tobytes(), self.positions.astype("<u4").tobytes()]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, raw: bytes) -> DonorSketch:
        """Raises ContractError for another algorithm, a wrong length or positions that are not ascending within the donor."""
        if len(raw) < _HEADER.size or raw[:8] != ALGORITHM:
            raise ContractError("sketch.algorithm", raw[:8], ALGORITHM.decode())
        _, token_count, checkpoint_count, samples = _HEADER.unpack_from(raw)
        if checkpoint_count > MAX_CHECKPOINTS or samples > MAX_SAMPLES:
            raise ContractError(
                "sketch.counts", (checkpoint_count, samples), f"{MAX_CHECKPOINTS}, {MAX_SAMPLES} at most"
            )
        stride = 4 + KEY_BYTES
        expected = _HEADER.size + checkpoint_count * stride + samples * 12
        if len(raw) != expected:
            raise ContractError("sketch.length", len(raw), f"{expected} bytes")
        at = _HEADER.size
        checkpoints = []
        for _ in range(checkpoint_count):
            (ordinal,) = struct.unpack_from("<I", raw, at)
            checkpoints.append((ordinal, BlockKey(raw[at + 4 : at + stride])))
            at += stride
        fingerprints = np.frombuffer(raw, "<u8", samples, at).astype(np.uint64)
        positions = np.frombuffer(raw, "<u4", samples, at + 8 * samples).astype(np.uint32)
        if samples and (
            int(positions[-1]) + NGRAM > token_count or bool(np.any(np.diff(positions.astype(np.int64)) <= 0))
        ):
            raise ContractError(
                "sketch.positions", "unordered or out of range", "ascending window starts inside the donor"
            )
        return cls(token_count, fingerprints, positions, tuple(checkpoints))
