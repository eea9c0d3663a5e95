"""Token ids as engines hand them over, packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.contracts.errors import ContractError
from worker_connector.engine_api.request_view import pack_tokens, request_tokens, unpack_tokens

TOKENS = [0, 1, 2**31 - 1, 7, 128_000]
WAYS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    iter,
    lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.uint32),
    lambda tokens: np.array(tokens, np.int64),
    lambda tokens: np.array(tokens, ">i4"),
    lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [TOKENS, []])
def test_all_ways_are_packed_alike(way: Callable[[list[int]], Any], tokens: list[int]) -> None:
    raw = pack_tokens(way(tokens))
    assert raw == np.array(tokens, "<u4").tobytes()
    assert unpack_tokens(raw).tolist() == tokens


@pytest.mark.parametrize("tokens", [[5, -1, 5], [-(2**31)]])
@pytest.mark.parametrize("way", [list, tuple, lambda t: np.array(t, np.int32), lambda t: np.array(t, np.int64)])
def test_a_negative_id_is_refused(way: Callable[[list[int]], Any], tokens: list[int]) -> None:
    """Wrapped around it would be another token."""
    with pytest.raises(ContractError, match="tokens"):
        pack_tokens(way(tokens))


@pytest.mark.parametrize("tokens", [[2**32], [1.5], ["1"], np.array([2**32]), np.array([1.5])])
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(ContractError, match="tokens"):
        pack_tokens(tokens)


def test_a_view_is_copied() -> None:
    """The engine writes on in its own memory."""

    class Request:
        tokens = np.array(TOKENS, np.int32)

        def get_tokens_view(self, beam: int) -> Any:
            return self.tokens

    request = Request()
    raw = request_tokens(request)
    request.tokens[:] = 9
    assert unpack_tokens(raw).tolist() == TOKENS
