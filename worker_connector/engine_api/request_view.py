"""What the connector reads from an engine's request object, by name and with getattr: versions of TensorRT-LLM differ
in what they bind (KV Cache Connector doc; `LlmRequest` bindings). Nothing is written to a request, and no request is
kept.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.report import Reason

_WORD_MASK = 2**32 - 1
_INT32 = np.dtype("<i4")


class RequestScope(NamedTuple):
    """The parts of a request that enter its namespace. None means unknown, "" and () mean absent
    (contracts/namespace.py)."""

    salt: str | None
    """The cache salt itself, or None without one."""
    salt_known: bool
    adapter: int | None
    """The engine's LoRA task id; None without an adapter."""
    multimodal: tuple[str, ...] | None


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Little-endian u32. ContractError for an id that does not fit: wrapping it would alias another token."""
    if isinstance(tokens, np.ndarray):
        if (
            tokens.dtype == _INT32
        ):  # as engines have them: copied first, so that the search for negative ones reads the cache
            raw = tokens.tobytes()
            if raw and int(np.frombuffer(raw, _INT32).min()) < 0:
                raise ContractError("tokens", f"{tokens.dtype}", "token ids in [0, 2^32)", secret=True)
            return raw
        if tokens.dtype.kind not in "iu" or (len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > _WORD_MASK)):
            raise ContractError("tokens", f"{tokens.dtype}", "token ids in [0, 2^32)", secret=True)
        return tokens.astype("<u4").tobytes()
    try:
        if isinstance(tokens, list):
            words = array("I")
            words.fromlist(tokens)  # two thirds of what the constructor takes
        else:
            words = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ContractError("tokens", type(tokens).__name__, "token ids in [0, 2^32)", secret=True) from error
    if words.itemsize != 4:  # not on any platform that TensorRT-LLM runs on
        return np.asarray(words, dtype="<u4").tobytes()
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack_tokens(raw: bytes | bytearray) -> TokenArray:
    """The inverse of `pack_tokens`, shape [n]."""
    return np.frombuffer(bytes(raw), dtype="<u4").astype(np.uint32)


def request_tokens(request: Any) -> bytes:
    """All tokens of beam 0, packed."""
    view = getattr(request, "get_tokens_view", None)
    if view is not None:
        return pack_tokens(np.asarray(view(0)))
    return pack_tokens(request.get_tokens(0))


def is_dummy(request: Any) -> bool:
    """True for requests that pad attention data parallelism or warm the engine up; they must never touch storage."""
    return bool(getattr(request, "is_dummy", False) or getattr(request, "is_dummy_request", False))


def is_cancelled(request: Any) -> bool:
    """True if the engine says that the request ended by cancellation."""
    return bool(getattr(request, "is_finished_due_to_cancellation", False))


_NEEDS_WHOLE_CONTEXT = ("py_return_context_logits", "return_context_logits", "py_additional_outputs")
"""A request with one of these set wants something for every prompt token, and for a token that is loaded nothing is
computed. Prompt log probabilities set the first; whether an additional output is made per prompt token depends on the
model, so any counts."""
_NOT_OF_TOKENS = (
    "prompt_embedding_table",
    "position_ids",
    "encoder_tokens",
    "encoder_input_features",
    "py_encoder_input_features",
    "py_encoder_output",
)
"""KV of such a request depends on more than its tokens: prompt tuning, positions of its own, an encoder's input."""
_MEDIA = ("multimodal_embedding", "py_multimodal_data", "py_mm_encoder_state", "mrope_rotary_cos_sin")
"""Where versions of TensorRT-LLM and its backends carry media, or positions that follow from media."""
_MEDIA_PLACES = ("multimodal_positions", "multimodal_lengths")


def unsupported(request: Any) -> Reason | None:
    """The reason why no KV may be offered to a request, or None: its KV is not a function of tokens and namespace
    alone, the engine does not prefill it itself, or it returns something for every prompt token."""
    generation_only = getattr(request, "is_generation_only_request", False)
    if callable(generation_only):
        generation_only = generation_only()
    if (
        generation_only
        or _any_set(request, _NOT_OF_TOKENS)
        or any(getattr(request, name, None) for name in _NEEDS_WHOLE_CONTEXT)
    ):
        return Reason.UNSUPPORTED_REQUEST
    return None


def _any_set(request: Any, names: Sequence[str]) -> bool:
    """True if one of these attributes is there and neither None nor empty. A tensor only has to be there."""
    for name in names:
        value = getattr(request, name, None)
        if value is not None and not (isinstance(value, (dict, list, tuple, str)) and not value):
            return True
    return False


def served_position(request: Any) -> int | None:
    """Where the forward pass starts, read inside `update_state_after_alloc`: on KVCacheManagerV2 the prefix is served
    by then."""
    for name in ("context_current_position", "prepopulated_prompt_len"):
        value = getattr(request, name, None)
        if isinstance(value, int) and value >= 0:
            return value
    return None


def matched_tokens(request: Any) -> int | None:
    """How many tokens of the connector's offer the runtime says it honours, where its request object says it."""
    value = getattr(request, "py_num_connector_matched_tokens", None)
    return value if isinstance(value, int) and value >= 0 else None


def scope_of(request: Any) -> RequestScope:
    """Reads from the request's attributes what enters its namespace."""
    salt = getattr(request, "cache_salt", None)
    # Older builds bind only a 64-bit digest of the salt: that there is one is known, which one is not.
    salt_known = salt is not None or getattr(request, "cache_salt_id", None) is None
    adapter = getattr(request, "lora_task_id", None)
    return RequestScope(
        salt=salt if salt is None else str(salt),
        salt_known=salt_known,
        adapter=None if adapter is None else int(adapter),
        multimodal=_multimodal(request),
    )


def _multimodal(request: Any) -> tuple[str, ...] | None:
    """Content hashes as 64 hex digits each; None when there is media without a hash, whichever attribute carries it
    (NVIDIA/TensorRT-LLM#13579, LMCache#4086)."""
    hashes: Sequence[Sequence[int]] = getattr(request, "multimodal_hashes", None) or ()
    places = max(len(getattr(request, name, None) or ()) for name in _MEDIA_PLACES)
    if places > len(hashes) or (not hashes and _any_set(request, _MEDIA)):
        return None
    return tuple("".join(f"{int(word) & _WORD_MASK:08x}" for word in words) for words in hashes)
