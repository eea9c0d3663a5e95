"""LoadPlan: every order of events that an engine and a rank can produce (vllm-ascend#16662, LMCache#2803)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_semkv.contracts.keys import root_key
from dynamo_semkv.contracts.report import Outcome, Reason
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.plan import ENDED, LoadPlan, PlanError, PlanKey, PlanState
from worker_connector.requests.ending import ending_of

SIZE = 4


def path(blocks: int) -> list[BlockEntry]:
    return [BlockEntry(b"", root_key(b""), None, b"", ordinal, ordinal) for ordinal in range(blocks)]


def plan(blocks: int = 5, local: int = 4) -> LoadPlan:
    return LoadPlan(PlanKey(1, 0), path(blocks), local, SIZE)


@pytest.mark.parametrize(("blocks", "local"), [(2, 8), (2, 12), (3, 6)])
def test_an_offer_of_nothing_or_from_inside_a_block_is_none(blocks: int, local: int) -> None:
    with pytest.raises(PlanError):
        plan(blocks, local)


@given(
    blocks=st.integers(2, 12),
    local_blocks=st.integers(0, 11),
    computed=st.integers(-2, 60),
    position=st.integers(-5, 70),
)
def test_what_is_loaded_covers_what_is_used_and_stays_inside_the_offer(
    blocks: int, local_blocks: int, computed: int, position: int
) -> None:
    local = min(local_blocks, blocks - 1) * SIZE
    it = plan(blocks, local)
    it.bind(None)
    ordinals = it.send(computed, position, 1)
    assert 0 <= it.honoured <= it.offered
    assert it.position == it.held + it.honoured
    assert it.held == (max(local, computed) if computed < it.position else local)
    assert ordinals.stop <= blocks
    if it.honoured:
        start = max(computed, 0) if computed < it.position else local
        assert list(ordinals) == list(range(start // SIZE, -(-it.position // SIZE)))
        assert it.copying
    else:
        assert (len(ordinals), it.state, it.reason) == (0, PlanState.DROPPED, Reason.NOT_HONOURED)


def test_a_version_that_counts_external_tokens_as_computed_still_gets_its_load() -> None:
    """Otherwise the range would be empty and the pages would stay unwritten."""
    it = plan(5, 4)
    it.bind(20)
    assert list(it.send(20, 20, 1)) == [1, 2, 3, 4]


class PlanMachine(RuleBasedStateMachine):
    """Any legal or illegal call in any state: it ends once, counts never grow downstream, the lease ends exactly once
    and not before the copy's end."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan()
        self.sent = 0
        self.endings: list[tuple[PlanState, Reason | None]] = []
        self.copy_running = False

    def attempt(self, allowed: bool, call: object) -> None:
        before = (self.plan.state, self.plan.honoured, self.plan.copied, self.plan.confirmed)
        try:
            call()  # type: ignore[operator]
        except PlanError:
            assert not allowed
            assert before == (self.plan.state, self.plan.honoured, self.plan.copied, self.plan.confirmed)
        else:
            assert allowed
        if self.plan.ended and not self.endings:
            self.endings.append((self.plan.state, self.plan.reason))

    @rule(position=st.one_of(st.none(), st.integers(0, 30)))
    def bind(self, position: int | None) -> None:
        self.attempt(self.plan.state is PlanState.OFFERED, lambda: self.plan.bind(position))

    @rule(computed=st.integers(0, 24), position=st.integers(0, 30))
    def send(self, computed: int, position: int) -> None:
        allowed = self.plan.state is PlanState.BOUND
        self.attempt(allowed, lambda: self.plan.send(computed, position, 7))
        self.sent += allowed
        self.copy_running = self.plan.copying

    @rule(ok=st.booleans())
    def copy_done(self, ok: bool) -> None:
        self.attempt(self.copy_running, lambda: self.plan.copy_done(ok, 0.1))
        self.copy_running = False

    @rule()
    def confirm(self) -> None:
        self.attempt(self.plan.state is PlanState.COPIED, self.plan.confirm)

    @rule(reason=st.sampled_from([Reason.CANCELLED, Reason.NOT_SCHEDULED, Reason.GENERATION_STALE]))
    def drop(self, reason: Reason) -> None:
        self.attempt(not self.plan.ended, lambda: self.plan.drop(reason))

    @invariant()
    def counts_never_grow_downstream(self) -> None:
        it = self.plan
        assert 0 <= it.confirmed <= it.copied <= it.honoured <= it.offered
        assert it.confirmed == 0 or it.state is PlanState.CONFIRMED
        assert self.sent <= 1

    @invariant()
    def lease_outlives_the_copy(self) -> None:
        it = self.plan
        if it.copying:
            assert not it.lease_ended
        if it.lease_ended:
            assert it.ended or it.state is PlanState.COPIED

    @invariant()
    def the_end_is_final(self) -> None:
        if self.endings:
            assert self.endings == [(self.plan.state, self.plan.reason)]

    @precondition(lambda self: self.plan.ended)
    @rule()
    def the_report_says_how_it_ended(self) -> None:
        ending = ending_of(self.plan)
        assert (ending.outcome is Outcome.MATERIALIZED_EXACT) == (self.plan.state is PlanState.CONFIRMED)
        assert (ending.confirmed > 0) == (self.plan.state is PlanState.CONFIRMED)
        assert self.plan.state in ENDED


TestPlanMachine = PlanMachine.TestCase
