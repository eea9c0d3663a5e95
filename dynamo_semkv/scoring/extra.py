"""Scorers of somebody else beside ours: one number a replica, in the sheet's own unit.

An extra scorer may raise, or answer what is no number: it then says nothing of that replica, and `on_fault` is told. It is called in the
event loop, once for each replica of each request that is weighed, so it computes and never waits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Protocol

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.scoring.candidate import ReplicaView
from dynamo_semkv.scoring.donor_value import TokenValue
from dynamo_semkv.scoring.scorers import SCORERS, Situation

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class ExtraScorer(Protocol):
    @property
    def name(self) -> str:
        """Of its part in the score sheet: lower case letters, digits and `_`, and none of ours."""
        ...

    def tokens(self, view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
        """Tokens of prefill that it is worth to serve the request on this replica (negative: that it costs). `match`: the strongest
        evidence there. At most the length of the prompt counts, either way."""
        ...


class GuardedScorer:
    """What an extra scorer says, made safe: finite, bounded by the prompt, 0 for a fault."""

    def __init__(self, scorer: ExtraScorer, on_fault: Callable[[Exception], None]) -> None:
        """ContractError for a name that cannot be, or something that cannot be called."""
        name = getattr(scorer, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in SCORERS:
            allowed = f"1 to 32 of a-z, 0-9 and _, beginning with a letter, and not {', '.join(SCORERS)}"
            raise ContractError("scorer.name", name, allowed)
        if not callable(getattr(scorer, "tokens", None)):
            raise ContractError(f"scorer {name}", type(scorer).__name__, "an object with a method `tokens`")
        self.name = name
        self._scorer = scorer
        self._on_fault = on_fault

    def value(self, view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> TokenValue:
        try:
            said = float(self._scorer.tokens(view, match, at))
            if not math.isfinite(said):
                raise ContractError(f"scorer {self.name}", said, "a finite number of tokens")
        except Exception as error:  # noqa: BLE001 - somebody else's code; counted and logged by who listens, and the request goes on
            self._on_fault(error)
            return TokenValue(0.0)
        return TokenValue(max(-float(at.input_tokens), min(float(at.input_tokens), said)))


def share(value: TokenValue, at: Situation) -> float:
    """Its size in [0, 1] of the prompt, as other parts of a row show theirs."""
    return abs(value) / at.input_tokens if at.input_tokens > 0 else 0.0
