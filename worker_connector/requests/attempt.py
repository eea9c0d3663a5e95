"""Attempt: one time that the engine asked about one request, from the question to its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.ledger.plan import LoadPlan, PlanKey, PlanState
from worker_connector.requests.ending import Ending
from worker_connector.requests.hints import ParsedHints
from worker_connector.requests.load_decision import Decline, Question
from worker_connector.timings import Timings


@dataclass(eq=False, slots=True)
class Attempt:
    """One question of the engine about one request, and what became of it: a plan, or the reason why nothing was
    offered."""

    key: PlanKey
    tokens: bytes
    """The prompt when it was asked about, packed u32."""
    namespace: CacheNamespace
    digest: bytes
    question: Question
    asked: int
    """Iteration of the question."""
    decline: Decline | None = None
    """Set when nothing was offered; else there is a plan."""
    plan: LoadPlan | None = None
    hints: ParsedHints | None = None
    """From the request itself, where the engine carries hints."""
    position: int | None = None
    """Where the forward pass starts, as read after allocation."""
    cancelled_from: int | None = None
    """First token position that the engine said it will not take from the offer (`cancel_load`)."""
    load_start: int | None = None
    """First token position that an asynchronous load fills: what the engine held itself when it allocated."""
    content: int = 0
    """Which of the cache's contents was offered from; a reset of the cache makes the next one
    (`CacheGeneration.content`)."""
    parked: bool = False
    """Its asynchronous load went out, and the engine has not reported the request since."""
    scheduled: bool = False
    """It was in a batch: what happens to it now is this attempt's, not a repetition of the question."""
    ended_well: bool = False
    """The request ended by itself before the ranks had said that its copies landed."""
    leased: bool = False
    closed: bool = False
    timings: Timings = field(default_factory=Timings)

    @property
    def unanswered(self) -> bool:
        """Something was offered, and the request has not been in a batch since."""
        return self.plan is not None and not self.scheduled

    @property
    def relied_on(self) -> bool:
        """The engine has allocated pages for what was offered, and may have taken some of it."""
        return (
            self.plan is not None
            and self.plan.state is PlanState.BOUND
            and (self.position is None or self.position > self.plan.held)
        )


class ClosedAttempt(NamedTuple):
    """What the reporter needs. Immutable, so that it can be worked on in another thread."""

    key: PlanKey
    tokens: bytes
    namespace: CacheNamespace
    digest: bytes
    question: Question
    ending: Ending | Decline
    hints: ParsedHints | None
    generation: Generation
    timings: Timings = Timings()
