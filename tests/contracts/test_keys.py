"""Block keys and prompt keys: a chain, whole blocks only, and token ids that are refused rather than wrapped."""

from __future__ import annotations

import re
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import (
    TOKEN_ID_MAX,
    BlockChain,
    as_tokens,
    block_keys,
    child_key,
    on_bytes,
    packed,
    prompt_key,
    root_key,
)

DIGEST = bytes(32)
ids = st.lists(st.integers(0, TOKEN_ID_MAX), max_size=40)


@given(ids, st.integers(1, 9), st.lists(st.integers(0, 10**6), max_size=6))
def test_the_chain_that_is_made_when_asked_for_is_the_same(tokens: list[int], size: int, asked: list[int]) -> None:
    keys, chain = block_keys(DIGEST, tokens, size), BlockChain(DIGEST, as_tokens(tokens), size)
    assert (len(chain), bool(chain)) == (len(keys), bool(keys))
    for at in asked if keys else ():  # in whatever order
        assert chain[at % len(keys)] == keys[at % len(keys)]
        assert chain[-1 - at % len(keys)] == keys[-1 - at % len(keys)]
    assert list(chain) == keys
    assert chain[1:4] == keys[1:4]
    for outside in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError):
            chain[outside]


def test_threads_that_ask_at_once_get_one_chain() -> None:
    tokens = as_tokens(list(range(20_000)))
    keys, chain = block_keys(DIGEST, tokens, 4), BlockChain(DIGEST, tokens, 4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: chain[at], [len(keys) - 1 - n * 617 % len(keys) for n in range(64)]))
    assert found == [keys[len(keys) - 1 - n * 617 % len(keys)] for n in range(64)]
    assert list(chain) == keys


@given(ids, st.integers(1, 9))
def test_the_chain_by_its_definition(tokens: list[int], size: int) -> None:
    expected, parent = [], root_key(DIGEST)
    for at in range(0, len(tokens) - size + 1, size):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + size])
        parent = child_key(parent, raw)
        expected.append(parent)
    assert block_keys(DIGEST, tokens, size) == expected
    assert block_keys(DIGEST, tokens, size, limit=2) == expected[:2]


@given(ids, ids, st.integers(1, 5))
def test_keys_agree_exactly_as_far_as_whole_blocks_do(left: list[int], right: list[int], size: int) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    a, b = block_keys(DIGEST, left, size), block_keys(DIGEST, right, size)
    equal = [one == two for one, two in zip(a, b, strict=False)]
    assert equal == [index < common // size for index in range(len(equal))]


@given(ids, ids)
def test_prompt_keys(left: list[int], right: list[int]) -> None:
    assert (prompt_key(DIGEST, left) == prompt_key(DIGEST, right)) == (left == right)


FORMS = [list, tuple, lambda t: array("I", t), lambda t: np.asarray(t, np.int64), lambda t: np.asarray(t, ">u4")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [[], [0, 1, TOKEN_ID_MAX, 77]])
def test_every_form_of_a_prompt_has_the_same_keys(form: Any, tokens: list[int]) -> None:
    given = form(tokens)
    assert as_tokens(given).tolist() == tokens
    assert as_tokens(given).dtype == np.uint32
    assert prompt_key(DIGEST, given) == prompt_key(DIGEST, tokens)
    assert block_keys(DIGEST, given, 2) == block_keys(DIGEST, tokens, 2)


def test_a_strided_view_is_hashed_as_what_it_shows() -> None:
    view = np.arange(10, dtype=np.uint32)[::2]
    assert prompt_key(DIGEST, view) == prompt_key(DIGEST, [0, 2, 4, 6, 8])


REFUSED: list[Any] = [
    [-1],
    [TOKEN_ID_MAX + 1],
    [2**64],
    [1.0],
    [True],
    ["1"],
    [[1, 2]],
    [[1], [2, 3]],
    [None],
    b"abcd",
    bytearray(4),
    memoryview(b"abcd"),
    "text",
    np.zeros((2, 2), np.uint32),
    np.asarray([0.5]),
]


@pytest.mark.parametrize("tokens", REFUSED, ids=lambda tokens: re.sub(r" at 0x\w+", "", repr(tokens)))
def test_what_is_no_prompt_is_refused(tokens: Any) -> None:
    with pytest.raises(ContractError, match=r"^tokens: "):
        as_tokens(tokens)


def test_token_ids_are_not_shown() -> None:
    with pytest.raises(ContractError) as caught:
        as_tokens([123_456_789_012])
    assert "123456789012" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_a_size(size: int) -> None:
    with pytest.raises(ContractError, match="tokens_per_block"):
        block_keys(DIGEST, [1], size)


@given(ids, st.integers(-3, 3).filter(bool), st.integers(0, 5))
def test_packed_is_what_an_array_shows_whatever_it_stands_on(tokens: list[int], step: int, start: int) -> None:
    whole = on_bytes(as_tokens(tokens))
    assert packed(whole) is packed(whole), "its own bytes, not a copy"
    assert not whole.flags.writeable
    for view in (whole, whole[start:], whole[::step], whole[start::step], whole.copy()[::step]):
        assert packed(view) == b"".join(int(token).to_bytes(4, "little") for token in view)
