"""DonorSketch: what a donor's tokens look like, without the tokens.

The connector computes it off the hot path and ships it in `provider_metadata`; the router's fingerprint provider
indexes it and computes the same for a prompt. Both sides must agree to the bit, so the algorithm is part of the
contract and has golden vectors.

Algorithm `ng8m08-2`, all in wrapping u64, with R and C odd constants and key from the namespace digest (so equal text
under two tenants has unrelated samples):

* spacing w of a text of n tokens: 8 up to 2,560 tokens, 16 up to 5,120, else 32. So a sketch has some 320 samples at
  most up to 10,000 tokens, and a short text is measured as finely as that allows.
* window hash at i:  `s = C * sum(t[i + k] * R**k for k in 0..7) + key`; fingerprint: the upper 32 bits of `mix(s)`, mix
  being splitmix64's finaliser. The window is a *sample* when `s < 2**61`, 1 in 8, and the fingerprint is a multiple of
  w / 8: 1 in w, decided by its content alone, so an insertion shifts nothing, and the samples at a spacing are among
  those at every smaller one. Of consecutive samples with one fingerprint only the first is kept (runs of one token).
* link of a sample at p whose next sample is at q: the upper 16 bits of `mix((C * sum(t[p + k] * R**k) + key) ^ ((q - p)
  * C))`, the sum taken over all tokens from its own window to the end of the next one's; 0 means none (last sample), a
  computed 0 is written as 1.

Two samples with equal fingerprint and equal non-zero link therefore have equal tokens up to the end of the next sample,
but for a chance of 2**-16: that is what lets a consumer say *where* two prompts are verbatim and where they only
resemble each other.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import KEY_BYTES, BlockKey, TokenArray

ALGORITHM = b"ng8m08-2"
NGRAM = 8
SAMPLING = 32
"""The widest spacing: samples that any two texts have in common if they share the window."""
MAX_SAMPLES = 4_096
MAX_CHECKPOINTS = 64
_MANY_BLOCKS = 32
"""Blocks between two checkpoints whose keys cost more than to ask the samples whether they can be equal."""

U64Array = npt.NDArray[np.uint64]
U32Array = npt.NDArray[np.uint32]
U16Array = npt.NDArray[np.uint16]

_MASK = 2**64 - 1
_R = 0x9E3779B97F4A7C15
_C = 0xD1342543DE82EF95
_R_INVERSE = pow(_R, -1, 2**64)
_DENSEST = 8
_THRESHOLD = np.uint64(2**64 // _DENSEST)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32, _48 = (np.uint64(bits) for bits in (27, 30, 31, 32, 48))
_ODD, _ONE = np.uint64(_C), np.uint64(1)
_SPACINGS = ((2_560, 8), (5_120, 16))
_HEADER = struct.Struct("<8sIHI")
_ORDINAL = struct.Struct("<I")
_CHECKPOINT = struct.Struct(f"<I{KEY_BYTES}s")
_STRIDE = _ORDINAL.size + KEY_BYTES
_NARROW, _WIDE = np.dtype("<u2"), np.dtype("<u4")
_NARROW_TOKENS = 2**16 + NGRAM - 1
"""Donors up to this length carry u16 positions, longer ones u32."""


class Samples(NamedTuple):
    """Three arrays of shape [m], m about (n - 7) / spacing, ordered by position."""

    fingerprints: U32Array
    positions: U32Array
    """Window starts, ascending."""
    links: U16Array


def sketch_key(namespace_digest: bytes) -> int:
    """u64 that keys the hashes; a pure function of the namespace (and so of the tenant)."""
    return int.from_bytes(hashlib.blake2b(namespace_digest, digest_size=8, person=b"semkv-sketch").digest(), "little")


class _Powers:
    """R**i and C * R**-i for i < n, grown on demand. Replaced as one tuple, so threads never see two lengths."""

    def __init__(self) -> None:
        self._tables = self._make(1 << 14)

    def upto(self, n: int) -> tuple[U64Array, U64Array]:
        tables = self._tables
        if len(tables[0]) < n:
            tables = self._tables = self._make(1 << n.bit_length())
        return tables

    @staticmethod
    def _make(size: int) -> tuple[U64Array, U64Array]:
        up = np.full(size, _R, np.uint64)
        up[0] = 1
        down = np.full(size, _R_INVERSE, np.uint64)
        down[0] = _C
        return np.cumprod(up, dtype=np.uint64), np.cumprod(down, dtype=np.uint64)


_POWERS = _Powers()


def _mix(h: U64Array) -> U64Array:
    """In place."""
    shifted = h >> _30
    h ^= shifted
    h *= _MIX_1
    np.right_shift(h, _27, out=shifted)
    h ^= shifted
    h *= _MIX_2
    np.right_shift(h, _31, out=shifted)
    h ^= shifted
    return h


def spacing_of(tokens: int) -> int:
    """Mean distance of the samples in the sketch of a text of so many tokens."""
    for most, spacing in _SPACINGS:
        if tokens <= most:
            return spacing
    return SAMPLING


_NO_SAMPLES = Samples(np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, np.uint16))


class Windows(NamedTuple):
    """The windows of a text that are samples, shape [m], in order."""

    fingerprints: U32Array
    starts: npt.NDArray[np.intp]


_NO_WINDOWS = Windows(np.empty(0, np.uint32), np.empty(0, np.intp))


class SampledText:
    """A text's samples at every spacing: what is hashed is hashed once, for a prompt that is compared with short and
    long donors. Links are made when they are asked for: most prompts are compared with nobody."""

    def __init__(self, tokens: TokenArray, key: int) -> None:
        """`tokens`: u32, shape [n]. Cost: eight passes over n words, no Python loop over tokens (some 30 us for 8k
        tokens)."""
        n = self._tokens = len(tokens)
        self._key = np.uint64(key)
        if n < NGRAM:
            return
        up, self._down = _POWERS.upto(n)
        self._prefix = np.empty(n + 1, np.uint64)
        self._prefix[0] = 0
        sums = self._prefix[1:]
        sums[:] = tokens
        sums *= up[:n]
        np.add.accumulate(sums, out=sums)
        s = self._prefix[NGRAM:] - self._prefix[:-NGRAM]
        s *= self._down[: n - NGRAM + 1]
        s += self._key
        self._at = (s < _THRESHOLD).nonzero()[0]
        mixed = _mix(s.take(self._at))
        mixed >>= _32
        self._fingerprints = mixed.astype(np.uint32)

    def windows(self, spacing: int, limit: int = MAX_SAMPLES) -> Windows:
        """The first `limit` ones; none of a text of fewer than 8 tokens. `spacing`: 8, 16 or 32."""
        if self._tokens < NGRAM:
            return _NO_WINDOWS
        at, fingerprints = self._at, self._fingerprints
        if spacing > _DENSEST:
            kept = (fingerprints & np.uint32(spacing // _DENSEST - 1) == 0).nonzero()[0]
            at, fingerprints = at.take(kept), fingerprints.take(kept)
        repeated = fingerprints[1:] == fingerprints[:-1]
        if repeated.any():
            keep = np.concatenate(([True], ~repeated))
            at, fingerprints = at[keep], fingerprints[keep]
        return Windows(fingerprints[:limit], at[:limit])

    def linked(self, windows: Windows) -> Samples:
        """`windows`: some that it made."""
        fingerprints, at = windows
        if len(at) == 0:
            return _NO_SAMPLES
        return Samples(fingerprints, at.astype(np.uint32), _links(self._prefix, at, self._down, self._key))

    def samples(self, spacing: int, limit: int = MAX_SAMPLES) -> Samples:
        """As `windows`, with the links."""
        return self.linked(self.windows(spacing, limit))


def sample(tokens: TokenArray, key: int) -> Samples:
    """What the sketch of a text has: u32 tokens of shape [n], at most MAX_SAMPLES samples (the first ones), none for n
    < 8."""
    return SampledText(tokens, key).samples(spacing_of(len(tokens)))


def _links(prefix: U64Array, at: npt.NDArray[np.intp], down: U64Array, key: np.uint64) -> U16Array:
    links = np.zeros(len(at), np.uint16)
    if len(at) > 1:
        start, stop = at[:-1], at[1:]
        # down[i] is C * R**-i: one multiplication makes the sum independent of its position.
        run = prefix.take(stop + NGRAM)
        run -= prefix.take(start)
        run *= down.take(start)
        run += key
        distance = (stop - start).astype(np.uint64)
        distance *= _ODD
        run ^= distance
        run = _mix(run)
        run >>= _48
        links[:-1] = np.maximum(run, _ONE, out=run)
    return links


def common_at_most(ours: Samples, theirs: Samples) -> int | None:
    """Tokens that two texts, sampled from their start at one spacing, can have in common there: a sample that only one
    of them has, or a link that differs, lies beyond. None: the samples do not say."""
    n = min(len(ours.fingerprints), len(theirs.fingerprints))
    if n == 0:
        return None
    differs = ours.fingerprints[:n] != theirs.fingerprints[:n]
    at = int(differs.argmax())
    if not differs[at]:
        at = n
    links = theirs.links[: max(0, at - 1)]
    broken = ours.links[: len(links)] != links
    broken &= links != 0
    if len(links) and broken[first := int(broken.argmax())]:
        at = first + 1
    return min(int(ours.positions[at]), int(theirs.positions[at])) + NGRAM - 1 if at < n else None


def checkpoint_ordinals(blocks: int) -> list[int]:
    """Ordinals whose keys a sketch carries: the last block of the first 1, 2, 3, 4, 6, 8, 12, ... blocks, and of all. A
    common prefix of b blocks is proven for more than two thirds of it, in whole blocks."""
    counts = {2**i for i in range(32)} | {3 * 2**i for i in range(31)}
    return sorted({count - 1 for count in counts if count <= blocks} | ({blocks - 1} if blocks else set()))


def merged_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges in order, touching and overlapping ones joined: an n-gram may cross the seam of two segments."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _position_size(tokens: int) -> int:
    return 2 if tokens <= _NARROW_TOKENS else 4


class DonorSketch(msgspec.Struct, frozen=True, gc=False):
    """Samples, the donor's length, and a few block keys that prove an exact prefix. Immutable; it holds its wire form
    and nothing else, and no garbage collection looks at it: a router has a hundred thousand.

    `checkpoints`: (ordinal, key) pairs of the donor's block key chain. If the request's own chain has the same key at a
    checkpoint, its first `ordinal + 1` blocks are identical to the donor's.
    """

    raw: bytes

    def __post_init__(self) -> None:
        """Raises ContractError for another algorithm, a wrong length or positions that are not ascending within the
        donor."""
        raw = self.raw
        if len(raw) < _HEADER.size or raw[:8] != ALGORITHM:
            raise ContractError("sketch.algorithm", raw[:8], ALGORITHM.decode())
        _, tokens, checkpoints, samples = self._header()
        if checkpoints > MAX_CHECKPOINTS or samples > MAX_SAMPLES:
            raise ContractError("sketch.counts", (checkpoints, samples), f"at most {MAX_CHECKPOINTS}, {MAX_SAMPLES}")
        expected = _HEADER.size + checkpoints * _STRIDE + samples * (6 + _position_size(tokens))
        if len(raw) != expected:
            raise ContractError("sketch.length", len(raw), f"{expected} bytes")
        if samples:
            end = _HEADER.size + checkpoints * _STRIDE + 4 * samples
            positions = np.frombuffer(raw, "<u2" if tokens <= _NARROW_TOKENS else "<u4", samples, end)
            ascending = (positions[1:] > positions[:-1]).tobytes()  # looked through in half the time that `all` takes
            if int(positions[-1]) + NGRAM > tokens or b"\0" in ascending:
                raise ContractError(
                    "sketch.positions", "unordered or out of range", "ascending window starts in the donor"
                )

    @classmethod
    def of(cls, tokens: TokenArray, namespace_digest: bytes, chain: Sequence[BlockKey]) -> DonorSketch:
        """`chain`: the block keys of the donor's resident full blocks, in order."""
        samples = sample(tokens, sketch_key(namespace_digest))
        return cls.pack(len(tokens), samples, [(o, chain[o]) for o in checkpoint_ordinals(len(chain))])

    @classmethod
    def pack(cls, token_count: int, samples: Samples, checkpoints: Sequence[tuple[int, BlockKey]]) -> DonorSketch:
        """The sketch of these samples and (ordinal, key) checkpoints."""
        parts = [_HEADER.pack(ALGORITHM, token_count, len(checkpoints), len(samples.fingerprints))]
        parts += [_ORDINAL.pack(ordinal) + key for ordinal, key in checkpoints]
        width = "<u2" if token_count <= _NARROW_TOKENS else "<u4"
        parts += [
            samples.fingerprints.astype("<u4").tobytes(),
            samples.positions.astype(width).tobytes(),
            samples.links.astype("<u2").tobytes(),
        ]
        return cls(b"".join(parts))

    def to_bytes(self) -> bytes:
        """Its wire form."""
        return self.raw

    @classmethod
    def from_bytes(cls, raw: bytes) -> DonorSketch:
        """The sketch of a wire form; ContractError as the constructor."""
        return cls(bytes(raw))

    @property
    def token_count(self) -> int:
        """Tokens of the donor."""
        return self._header()[1]

    @property
    def sample_count(self) -> int:
        """How many samples it has."""
        return self._header()[3]

    @property
    def spacing(self) -> int:
        """Mean distance of its samples in tokens."""
        return spacing_of(self.token_count)

    @property
    def fingerprints(self) -> U32Array:
        """A view: no copy."""
        _, _, checkpoints, samples = self._header()
        return np.frombuffer(self.raw, "<u4", samples, _HEADER.size + checkpoints * _STRIDE)

    @property
    def positions(self) -> npt.NDArray[np.uint16] | U32Array:
        """u16 or u32, a view."""
        _, tokens, checkpoints, samples = self._header()
        kind = "<u2" if tokens <= _NARROW_TOKENS else "<u4"
        return np.frombuffer(self.raw, kind, samples, _HEADER.size + checkpoints * _STRIDE + 4 * samples)

    @property
    def links(self) -> U16Array:
        """u16 of shape [samples], a view."""
        _, _, _, samples = self._header()
        return np.frombuffer(self.raw, "<u2", samples, len(self.raw) - 2 * samples)

    @property
    def samples(self) -> Samples:
        """The three arrays, views; positions of u16 or u32."""
        _, tokens, checkpoints, samples = self._header()
        at = _HEADER.size + checkpoints * _STRIDE
        kind = _NARROW if tokens <= _NARROW_TOKENS else _WIDE
        return Samples(
            np.frombuffer(self.raw, _WIDE, samples, at),
            np.frombuffer(self.raw, kind, samples, at + 4 * samples),
            np.frombuffer(self.raw, _NARROW, samples, len(self.raw) - 2 * samples),
        )

    @property
    def checkpoints(self) -> list[tuple[int, BlockKey]]:
        """The (ordinal, key) pairs, by ordinal."""
        end = _HEADER.size + self._header()[2] * _STRIDE
        return list(_CHECKPOINT.iter_unpack(self.raw[_HEADER.size : end]))

    def proven_blocks(
        self, chain: Sequence[BlockKey], samples: Samples | None = None, tokens_per_block: int = 1
    ) -> int:
        """How many leading blocks of `chain` (the request's) are proven equal to this donor's. `samples`: the request's
        from its start, at this donor's spacing; keys of blocks that cannot be equal, as these say, are then not
        made."""
        if not chain or not self._begins_with(chain[0]):
            return 0
        checkpoints = self.checkpoints
        within = len(chain)
        if samples is not None and checkpoints[-1][0] >= _MANY_BLOCKS:
            common = common_at_most(samples, self.samples)
            within = within if common is None else min(within, common // tokens_per_block)
            # A key stands for every block before it: where the last one that can be equal is, the others are too.
            last, key = checkpoints[bisect_left(checkpoints, (within, b"")) - 1]
            if last < within and chain[last] == key:
                return last + 1
        proven = 0
        for ordinal, key in checkpoints:
            # Behind the first that differs none is equal, and none need be made.
            if ordinal >= within or chain[ordinal] != key:
                break
            proven = ordinal + 1
        return proven

    def _begins_with(self, key: BlockKey) -> bool:
        """The first block is the same: every chain that has more in common has this too."""
        return self._header()[2] > 0 and self.raw[_HEADER.size + _ORDINAL.size : _HEADER.size + _STRIDE] == key

    def within(self, ranges: Sequence[tuple[int, int]], tokens_per_block: int) -> DonorSketch:
        """What is left of the donor when only these half-open token ranges are still there: samples whose window lies
        inside them, links that stay inside, and checkpoints up to the first token that is missing."""
        positions = self.positions.astype(np.int64)
        room = np.full(len(positions), -1, np.int64)
        merged = merged_ranges(ranges)
        for start, end in merged:
            room[(positions >= start) & (positions + NGRAM <= end)] = end
        keep = room >= 0
        links = self.links.copy()
        broken = np.ones(len(positions), np.bool_)
        broken[:-1] = positions[1:] + NGRAM > room[:-1]
        links[broken] = 0
        prefix = merged[0][1] if merged and merged[0][0] == 0 else 0
        samples = Samples(self.fingerprints[keep], positions[keep].astype(np.uint32), links[keep])
        kept = [(o, key) for o, key in self.checkpoints if (o + 1) * tokens_per_block <= prefix]
        return DonorSketch.pack(self.token_count, samples, kept)

    def _header(self) -> tuple[bytes, int, int, int]:
        """Algorithm, tokens, checkpoints, samples."""
        header: tuple[bytes, int, int, int] = _HEADER.unpack_from(self.raw)
        return header
