"""Keys over tokens: the block key chain and the prompt key.

A key only proposes. The stored tokens are compared before a block is offered, so a collision costs a miss and never a
wrong byte. Token ids are hashed as little-endian u32. Everything here is a pure function of (namespace digest, tokens).
"""

from __future__ import annotations

import hashlib
import threading
from array import array as array_of
from collections.abc import Sequence
from typing import NewType, cast, overload

import numpy as np
import numpy.typing as npt

from dynamo_semkv.contracts.errors import ContractError

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: blake2b-128 over (parent key, tokens of the full block); the root's parent is derived from the namespace
digest."""

PromptKey = NewType("PromptKey", bytes)
"""16 bytes over (namespace digest, all prompt tokens): joins a route to a report where no route id reaches the
engine."""

KEY_BYTES = 16
_U32 = next(code for code in "IL" if array_of(code).itemsize == 4)
TOKEN_ID_MAX = 2**32 - 1

_LITTLE = np.dtype("<u4")

TokenArray = npt.NDArray[np.uint32]


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.generic]) -> TokenArray:
    """Shape [n], u32. Refuses negative, too large or non-integer ids instead of wrapping them, and bytes (which would
    be read as one token a byte)."""
    if isinstance(tokens, (bytes, bytearray, memoryview, str)):
        raise ContractError("tokens", type(tokens).__name__, "a sequence of integers")
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32 and tokens.ndim == 1:
        return cast(TokenArray, tokens)
    if len(tokens) == 0:
        return np.empty(0, dtype=np.uint32)
    if isinstance(tokens, (list, tuple)) and not isinstance(tokens[0], bool):
        # Ten times as fast as numpy's own conversion, which looks for a type first; a router does this for every
        # prompt. `fromlist` takes two thirds of what it takes to hand the list to the constructor.
        try:
            ids = array_of(_U32)
            ids.fromlist(tokens if isinstance(tokens, list) else list(tokens))
            return np.frombuffer(ids, dtype=np.uint32)
        except (OverflowError, TypeError):
            pass  # refused below, in words
    try:
        array = np.asarray(tokens)
    except (OverflowError, ValueError, TypeError) as error:
        raise ContractError("tokens", type(tokens).__name__, "a flat sequence of integers") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ContractError("tokens", f"{array.dtype}, {array.ndim}-d", "a flat sequence of integers")
    if int(array.min()) < 0 or int(array.max()) > TOKEN_ID_MAX:
        raise ContractError("tokens", "out of range", f"ids in [0, {TOKEN_ID_MAX}]", secret=True)
    return array.astype(np.uint32)


def packed(tokens: TokenArray) -> bytes:
    """The ids as little-endian u32. An array that stands on such bytes gives them back, so they are made once a
    prompt."""
    base: object = tokens.base
    if type(base) is bytes and len(base) == 4 * len(tokens) and tokens.strides == (4,) and tokens.dtype == _LITTLE:
        return base
    return tokens.astype("<u4", copy=False).tobytes()


def on_bytes(tokens: TokenArray) -> TokenArray:
    """The same ids on bytes of their own, which nobody can write and `packed` gives back."""
    return np.frombuffer(packed(tokens), dtype=_LITTLE)


class BlockChain(Sequence[BlockKey]):
    """`block_keys`, made when they are asked for: a lookup asks for the first, and for more only where a donor begins
    like it. Threads may share it."""

    def __init__(self, namespace_digest: bytes, tokens: TokenArray, tokens_per_block: int) -> None:
        if tokens_per_block < 1:
            raise ContractError("tokens_per_block", tokens_per_block, "at least 1")
        self._step = 4 * tokens_per_block
        self._count = len(tokens) // tokens_per_block
        self._raw = packed(tokens)
        self._root = root_key(namespace_digest)
        self._keys: list[BlockKey] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> BlockKey: ...
    @overload
    def __getitem__(self, at: slice) -> list[BlockKey]: ...
    def __getitem__(self, at: int | slice) -> BlockKey | list[BlockKey]:
        if isinstance(at, slice):
            wanted = range(self._count)[at]
            self._make(max(wanted, default=-1))
            return [self._keys[number] for number in wanted]
        number = at + self._count if at < 0 else at
        if not 0 <= number < self._count:
            raise IndexError(at)
        self._make(number)
        return self._keys[number]

    def _make(self, last: int) -> None:
        if last < len(self._keys):
            return
        with self._lock:
            keys, raw, step = self._keys, self._raw, self._step
            parent: bytes = keys[-1] if keys else self._root
            made = []
            for start in range(len(keys) * step, (last + 1) * step, step):
                hasher = _BLOCK.copy()
                hasher.update(parent + raw[start : start + step])
                parent = hasher.digest()
                made.append(parent)
            keys += cast("list[BlockKey]", made)


def root_key(namespace_digest: bytes) -> BlockKey:
    """The key that the first block of a namespace follows."""
    return BlockKey(hashlib.blake2b(namespace_digest, digest_size=KEY_BYTES, person=b"semkv-root").digest())


_BLOCK = hashlib.blake2b(digest_size=KEY_BYTES, person=b"semkv-block")
"""Nothing hashed yet: a copy of it takes half as long as a new one, and a lookup makes a hundred."""


def child_key(parent: BlockKey, block_tokens: bytes) -> BlockKey:
    """`block_tokens`: the full block's ids as little-endian u32, 4 * tokens_per_block bytes."""
    hasher = _BLOCK.copy()
    hasher.update(parent + block_tokens)
    return BlockKey(hasher.digest())


def block_keys(
    namespace_digest: bytes, tokens: Sequence[int] | TokenArray, tokens_per_block: int, *, limit: int | None = None
) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, in order; a partial last block has none. At most `limit` keys."""
    if tokens_per_block < 1:
        raise ContractError("tokens_per_block", tokens_per_block, "at least 1")
    array = as_tokens(tokens)
    count = len(array) // tokens_per_block
    if limit is not None:
        count = min(count, limit)
    raw = array[: count * tokens_per_block].astype("<u4", copy=False).tobytes()
    step = 4 * tokens_per_block
    keys: list[BlockKey] = []
    parent = root_key(namespace_digest)
    for start in range(0, count * step, step):
        parent = child_key(parent, raw[start : start + step])
        keys.append(parent)
    return keys


def prompt_key(namespace_digest: bytes, tokens: Sequence[int] | TokenArray) -> PromptKey:
    """The key of a whole prompt in its namespace: equal for equal prompts, whatever the block size."""
    array = as_tokens(tokens)
    h = hashlib.blake2b(digest_size=KEY_BYTES, person=b"semkv-prompt")
    h.update(namespace_digest)
    h.update(len(array).to_bytes(8, "little"))
    h.update(packed(array))
    return PromptKey(h.digest())
