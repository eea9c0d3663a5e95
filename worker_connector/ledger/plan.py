"""LoadPlan: one offer from the promise to its confirmation, as a state machine.

    offered -> bound -> sent -> copied -> confirmed
       \\_________\\________\\_______\\____-> dropped(reason)

A plan belongs to one (request, allocation epoch), is sent to the ranks once, and ends once. It counts tokens and owns
the list of blocks that it may load; it does not know the ledger, pages or the engine. Whoever holds it gives the lease
back when `lease_ended` turns true: that is when the plan has ended *and* no copy of it can still be running (physical
end after logical end).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from dynamo_semkv.contracts.report import Reason
from worker_connector.ledger.block import BlockEntry


class PlanKey(NamedTuple):
    """Names a plan: its request, and the epoch of the allocation that it belongs to."""

    request_id: int
    epoch: int


class PlanState(str, Enum):
    """Where a plan stands; the module says which state may follow which."""

    OFFERED = "offered"
    BOUND = "bound"
    SENT = "sent"
    COPIED = "copied"
    CONFIRMED = "confirmed"
    DROPPED = "dropped"


ENDED = frozenset({PlanState.CONFIRMED, PlanState.DROPPED})
_NEXT = {
    PlanState.OFFERED: {PlanState.BOUND, PlanState.DROPPED},
    PlanState.BOUND: {PlanState.SENT, PlanState.DROPPED},
    PlanState.SENT: {PlanState.COPIED, PlanState.DROPPED},
    PlanState.COPIED: {PlanState.CONFIRMED, PlanState.DROPPED},
    PlanState.CONFIRMED: set[PlanState](),
    PlanState.DROPPED: set[PlanState](),
}


class PlanError(RuntimeError):
    """A transition that the state machine does not have: a fault of ours, or of an engine that reports an allocation
    twice."""


class LoadPlan:
    """`path`: the resident chain from block 0 to the last offered block. Blocks below the offer are there because the
    engine may turn out to hold less than it said when it asked."""

    __slots__ = (
        "confirmed",
        "copied",
        "copying",
        "held",
        "honoured",
        "is_async",
        "iteration",
        "key",
        "load_seconds",
        "local_tokens",
        "offered",
        "path",
        "position",
        "reason",
        "sent_in",
        "state",
        "tokens_per_block",
    )

    def __init__(
        self,
        key: PlanKey,
        path: Sequence[BlockEntry],
        local_tokens: int,
        tokens_per_block: int,
        *,
        is_async: bool = False,
    ) -> None:
        self.key = key
        self.is_async = is_async
        """Loaded while the request waits for it in the engine, not in front of its forward pass."""
        self.path = path
        self.tokens_per_block = tokens_per_block
        self.local_tokens = local_tokens
        self.held = local_tokens
        """Tokens that the engine holds itself by the time it allocates, as far as it has said: more than `local_tokens`
        where its own cache has caught up."""
        self.offered = len(self.path) * tokens_per_block - local_tokens
        self.honoured = 0
        self.copied = 0
        self.confirmed = 0
        self.position: int | None = None
        """Where the forward pass starts, as far as the engine has said: local plus honoured tokens."""
        self.state = PlanState.OFFERED
        self.reason: Reason | None = None
        self.iteration: int | None = None
        """Iteration of the forward pass that confirms it; None where none is known to come: before it is sent, or after
        a dropped batch."""
        self.sent_in: int | None = None
        """Iteration whose metadata carried it."""
        self.copying = False
        self.load_seconds: float | None = None
        if self.offered <= 0 or local_tokens % tokens_per_block:
            raise PlanError(f"an offer of {self.offered} tokens after {local_tokens} local ones is none")

    @property
    def end(self) -> int:
        """First token position after the offer."""
        return len(self.path) * self.tokens_per_block

    @property
    def served(self) -> Sequence[BlockEntry]:
        """Blocks that hold the honoured tokens."""
        size = self.tokens_per_block
        return self.path[self.held // size : -(-(self.held + self.honoured) // size)]

    @property
    def ended(self) -> bool:
        """Confirmed or dropped."""
        return self.state in ENDED

    @property
    def lease_ended(self) -> bool:
        """True when the lease may be given back. Copied is enough: bytes that have left the slab need no protection."""
        return not self.copying and (self.ended or self.state is PlanState.COPIED)

    def _to(self, state: PlanState) -> None:
        if state not in _NEXT[self.state]:
            raise PlanError(f"plan {self.key}: {self.state.value} -> {state.value}")
        self.state = state

    def bind(self, position: int | None) -> None:
        """Pages are allocated. `position`: where the engine says that its forward pass starts, if this version says
        it."""
        self._to(PlanState.BOUND)
        self.position = position

    def overtaken(self, end: int) -> None:
        """The engine holds the tokens below `end` itself by now, and takes none of them from the offer."""
        self.held = min(max(self.held, end), self.end)

    def send(self, computed: int, position: int, iteration: int) -> range:
        """The engine's first report: it holds `computed` tokens itself and starts at `position`. Returns the block
        ordinals to load, `[computed // tpb, ceil(position / tpb))`, which may be none: the engine honours any prefix of
        an offer, down to nothing.

        A position outside the offer is taken as the nearest end of it: more was never promised, and less means nothing
        was used.
        """
        position = min(max(position, self.local_tokens), self.end)
        self._to(PlanState.SENT)
        self.iteration = self.sent_in = iteration
        self.position = position
        if computed < position:
            self.overtaken(computed)
        self.honoured = max(position - self.held, 0)
        if self.honoured == 0:
            self.drop(Reason.NOT_HONOURED)
            return range(0)
        # An engine version that counts our tokens as computed would else leave nothing to load, and pages unwritten.
        start = max(computed, 0) if computed < position else self.held
        self.copying = True
        return range(start // self.tokens_per_block, -(-position // self.tokens_per_block))

    def copy_done(self, ok: bool, seconds: float | None = None, reason: Reason = Reason.COPY_FAILED) -> None:
        """The copy has ended on every rank. Called once, also for a plan that was dropped meanwhile, whose lease it
        frees. `reason`: why it failed."""
        if not self.copying:
            raise PlanError(f"plan {self.key}: no copy is running")
        self.copying = False
        if self.ended:
            return
        if not ok:
            self.drop(reason)
            return
        self._to(PlanState.COPIED)
        self.copied = self.honoured
        self.load_seconds = seconds

    def resume(self, position: int, iteration: int) -> None:
        """A request that waited for its load is back, and its forward pass of `iteration` starts at `position`. Where
        that is less than was honoured, the engine has thrown a part of the served prefix away
        (NVIDIA/TensorRT-LLM#18762), which then is no reuse."""
        if self.state is not PlanState.COPIED:
            raise PlanError(f"plan {self.key}: resumed while {self.state.value}")
        self.position = min(position, self.position if self.position is not None else position)
        self.iteration = iteration

    def confirm(self) -> None:
        """The forward pass ran from `position`, behind the copy."""
        self._to(PlanState.CONFIRMED)
        used = self.copied if self.position is None else self.position - self.held
        self.confirmed = min(max(used, 0), self.copied)
        self.reason = Reason.OK

    def drop(self, reason: Reason) -> None:
        """Ends the plan without a confirmation. PlanError if it has ended already."""
        self._to(PlanState.DROPPED)
        self.reason = reason
