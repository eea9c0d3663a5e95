"""Claims: turns what a provider returned into a bounded tuple of matches that are possible for the prompt. Runs in the
provider's own thread.

checked(returned, query) -> Claims

A provider may return what it likes: an endless generator, a list whose iteration sleeps, a million matches, numbers
that are none. All of that costs its own thread and its own deadline; the event loop, which every stream needs, only
ever sees what is returned here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np

from dynamo_semkv.contracts.evidence import (
    MatchType,
    SemanticTrtMatch,
    SemanticTrtSegment,
    are_signals,
    is_metadata,
)
from dynamo_semkv.contracts.identity import is_donor_id
from dynamo_semkv.contracts.location import SharedLocation, Tier, WorkerLocation
from dynamo_semkv.evidence.provider import LookupQuery

MAX_CLAIMS = 1_000
"""Matches that are looked at per lookup: some times the largest `evidence.max_matches`."""
MAX_SEGMENTS = 256
"""Most segments of one match."""
MAX_NAME = 256
"""Characters of a provider's name or generation."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_WHOLE = (int, np.integer)
_NUMBER = (int, float, np.integer, np.floating)
_PLAIN = (int, float, str)


class Claims(NamedTuple):
    """The sound matches of one provider's answer, how many were unsound, and whether there were more than
    MAX_CLAIMS."""

    matches: tuple[SemanticTrtMatch, ...] = ()
    unsound: int = 0
    """Not possible for this prompt, or not a match at all."""
    excess: bool = False
    """There were more than MAX_CLAIMS; the rest was not looked at."""


_NO_CLAIMS = Claims()


def checked(returned: object, query: LookupQuery) -> Claims:
    """Checks what a lookup returned. Raises TypeError for what is no list or tuple, and whatever the provider's own
    objects raise when they are read."""
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"a lookup returns a list or tuple of matches, not {type(returned).__name__}")
    if type(returned) in (list, tuple) and not returned:
        return _NO_CLAIMS  # what most lookups say
    looked = list(islice(returned, MAX_CLAIMS + 1))
    claimed = looked[:MAX_CLAIMS]
    prompt = len(query.tokens)
    matches = tuple(_plain(match) for match in claimed if _is_sound(match, prompt))
    return Claims(matches, len(claimed) - len(matches), len(looked) > MAX_CLAIMS)


def _is_sound(match: object, prompt: int) -> TypeGuard[SemanticTrtMatch]:
    """What a match claims is possible for a prompt of so many tokens, and of the types that the contract says: they are
    compared, hashed, summed and written down in the event loop later, beside what other providers returned."""
    return (
        type(match) is SemanticTrtMatch
        and isinstance(match.exact_prefix_tokens, _WHOLE)
        and 0 <= match.exact_prefix_tokens <= prompt
        and isinstance(match.reusable_token_count, _WHOLE)
        and 0 < match.reusable_token_count <= prompt
        and isinstance(match.overlap, _NUMBER)
        and 0.0 <= match.overlap <= 1.0
        and isinstance(match.confidence, _NUMBER)
        and 0.0 <= match.confidence <= 1.0
        and isinstance(match.match_type, MatchType)
        and _is_place(match.location)
        and isinstance(match.donor_id, str)
        and is_donor_id(match.donor_id)
        and _is_name(match.provider)
        and _is_name(match.provider_generation)
        and isinstance(match.segments, tuple)
        and len(match.segments) <= MAX_SEGMENTS
        and all(type(s) is SemanticTrtSegment and s.target_start + s.token_count <= prompt for s in match.segments)
        and are_signals(match.quality_signals)
        and is_metadata(match.metadata)
    )


def _is_place(location: object) -> bool:
    if type(location) is WorkerLocation:
        ids = isinstance(location.worker_id, _WHOLE) and isinstance(location.dp_rank, _WHOLE)
        return ids and isinstance(location.tier, Tier)
    return (
        type(location) is SharedLocation
        and isinstance(location.backend, str)
        and isinstance(location.locator, str)
        and isinstance(location.tier, Tier)
    )


def _is_name(text: object) -> bool:
    """A text short enough for a route event and without half a surrogate pair, which cannot be encoded."""
    return isinstance(text, str) and len(text) <= MAX_NAME and (text.isascii() or not _SURROGATE.search(text))


def _plain(match: SemanticTrtMatch) -> SemanticTrtMatch:
    """The match with Python's own numbers: a provider that works with NumPy returns NumPy's, with which neither a hint
    nor a route event can be written."""
    at = match.location
    if not (_are_plain(match.quality_signals) and _are_plain(match.metadata)):
        match = msgspec.structs.replace(
            match, quality_signals=_plain_values(match.quality_signals), metadata=_plain_values(match.metadata)
        )
    if type(at) is WorkerLocation and not type(at.worker_id) is type(at.dp_rank) is int:
        at = WorkerLocation(int(at.worker_id), int(at.dp_rank), at.tier)
    elif type(match.exact_prefix_tokens) is type(match.reusable_token_count) is int and (
        type(match.overlap) is type(match.confidence) is float
    ):
        return match
    return msgspec.structs.replace(
        match,
        exact_prefix_tokens=int(match.exact_prefix_tokens),
        reusable_token_count=int(match.reusable_token_count),
        overlap=float(match.overlap),
        confidence=float(match.confidence),
        location=at,
    )


def _are_plain(values: Mapping[str, Any]) -> bool:
    """Python's own numbers and texts in a dict, as our providers return them."""
    return type(values) is dict and all(type(value) in _PLAIN for value in values.values())


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if type(value) in (int, float) else str(value) if isinstance(value, str) else float(value)
        for name, value in values.items()
    }
