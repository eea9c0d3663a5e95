"""What a provider returned -> a bounded tuple of matches that are possible for the prompt. Runs in the provider's own thread.

checked(said, query) -> Claims

A provider may return what it likes: an endless generator, a list whose iteration sleeps, a million matches, numbers that are none. All
of that costs its own thread and its own deadline; the event loop, which every stream needs, only ever sees what is returned here.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch, SemanticTrtSegment
from dynamo_semkv.contracts.location import SharedLocation, WorkerLocation
from dynamo_semkv.evidence.provider import LookupQuery

MAX_CLAIMS = 1_000
"""Matches that are looked at per lookup: some times the largest `evidence.max_matches`."""
MAX_SEGMENTS = 256
"""Of one match."""
_WHOLE = (int, np.integer)
_NUMBER = (int, float, np.integer, np.floating)


class Claims(NamedTuple):
    matches: tuple[SemanticTrtMatch, ...] = ()
    unsound: int = 0
    """Not possible for this prompt, or not a match at all."""
    excess: bool = False
    """There were more than MAX_CLAIMS; the rest was not looked at."""


def checked(said: object, query: LookupQuery) -> Claims:
    """Raises TypeError for what is no list or tuple, and whatever the provider's own objects raise when they are looked at."""
    if not isinstance(said, (list, tuple)):
        raise TypeError(f"a lookup returns a list or tuple of matches, not {type(said).__name__}")
    looked = list(islice(said, MAX_CLAIMS + 1))
    claimed = looked[:MAX_CLAIMS]
    prompt = len(query.tokens)
    matches = tuple(match for match in claimed if _is_sound(match, prompt))
    return Claims(matches, len(claimed) - len(matches), len(looked) > MAX_CLAIMS)


def _is_sound(match: object, prompt: int) -> bool:
    """What a match claims is possible for a prompt of so many tokens, and of the types that the contract says: they are compared,
    hashed and summed in the event loop later."""
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
        and type(match.location) in (WorkerLocation, SharedLocation)
        and isinstance(match.donor_id, str)
        and isinstance(match.provider, str)
        and isinstance(match.provider_generation, str)
        and isinstance(match.segments, tuple)
        and len(match.segments) <= MAX_SEGMENTS
        and all(type(s) is SemanticTrtSegment and s.target_start + s.token_count <= prompt for s in match.segments)
    )


__all__ = ["MAX_CLAIMS", "MAX_SEGMENTS", "Claims", "checked"]
