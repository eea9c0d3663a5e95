"""Scorers of plugins beside ours: one number for each replica, in the sheet's own unit.

An extra scorer may raise, or return something that is no number: it then counts as 0 for that replica, and `on_fault`
gets the error. It is called in the event loop, once for each replica of each request that is weighed, so it must
compute and never wait. A slow one counts as 0 for every replica and is put aside for a while, since every stream of the
router stands still while it runs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.evidence.breaker import Breaker
from dynamo_semkv.scoring.donor_value import TokenValue
from dynamo_semkv.scoring.replica_view import ReplicaView
from dynamo_semkv.scoring.scorers import SCORERS, Situation

BUDGET_SECONDS = 0.010
"""For all replicas of one request."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class ExtraScorer(Protocol):
    """A scorer of a plugin. See docs/writing-a-scorer.md."""

    @property
    def name(self) -> str:
        """Of its part in the score sheet: lower case letters, digits and `_`, and none of ours."""
        ...

    def tokens(self, view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
        """Tokens of prefill that it is worth to serve the request on this replica (negative: that it costs). `match`:
        the strongest evidence there. At most the length of the prompt counts, either way."""
        ...


class ScorerSlow(Exception):
    """An extra scorer took longer than BUDGET_SECONDS."""


class GuardedScorer:
    """Calls an extra scorer and makes its values safe: finite, bounded by the prompt, 0 for a fault, and 0 for every
    replica while it is slow."""

    def __init__(
        self,
        scorer: ExtraScorer,
        on_fault: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        self._clock = clock
        self._breaker = Breaker(clock, threshold=1)

    def values(
        self, views: Sequence[ReplicaView], matches: Sequence[SemanticTrtMatch | None], at: Situation
    ) -> list[TokenValue]:
        """One a view, `matches` beside them. All 0 while it is put aside, or where it ran out of its budget half way:
        replicas that it had no time for would be compared with those that it had."""
        nothing = [TokenValue(0.0)] * len(views)
        if not self._breaker.allow():
            return nothing
        began = self._clock()
        said = []
        for view, match in zip(views, matches, strict=True):
            said.append(self._value(view, match, at))
            took = self._clock() - began
            if took > BUDGET_SECONDS:
                self._breaker.failure()
                text = f"scorer {self.name}: {1_000 * took:.0f} ms for {len(said)} of {len(views)} replicas"
                self._on_fault(
                    ScorerSlow(f"{text}, expected at most {1_000 * BUDGET_SECONDS:.0f} ms; put aside for a while")
                )
                return nothing
        self._breaker.success()
        return said

    def _value(self, view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> TokenValue:
        try:
            said = float(self._scorer.tokens(view, match, at))
            if not math.isfinite(said):
                raise ContractError(f"scorer {self.name}", said, "a finite number of tokens")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - somebody else's code, and SystemExit or CancelledError of its would end the loop or the request; counted and logged by who listens
            self._on_fault(error)
            return TokenValue(0.0)
        return TokenValue(max(-float(at.input_tokens), min(float(at.input_tokens), said)))


def share(value: TokenValue, at: Situation) -> float:
    """The size of the value as a share of the prompt, in [0, 1], as other parts of a row show theirs."""
    return abs(value) / at.input_tokens if at.input_tokens > 0 else 0.0
