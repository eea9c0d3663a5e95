"""Random schedules of an engine that parks requests: copies that run when they like, requests that vanish under them,
deadlines, replays, resets. Every page that a forward pass reads holds what a cold prefill would have put there; every
parked id is named once; all comes back."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.parking import Parking
from tests.worker_connector.scripted import Request
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY

SIZE = 4
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=6).flatmap(
    lambda heads: st.integers(1, SIZE).map(
        lambda rest: [t for head in heads for t in [head] * SIZE][: len(heads) * SIZE - SIZE + rest]
    )
)


class ParkingMachine(RuleBasedStateMachine):
    """Few pages, so that what is freed is soon another request's; a slab of 16 blocks."""

    @initialize(restarts=st.booleans(), groups=st.sampled_from([(None,), (None, None)]))
    def start(self, restarts: bool, groups: tuple[None, ...]) -> None:
        self.engine = Parking(restarts_failed=restarts, windows=groups, num_pages=200, slots=16)
        self.parked: list[tuple[Request, int]] = []
        self.running: list[Request] = []
        self.expected: list[int] = []
        self.fresh = 10
        """A token that no prompt has yet."""
        for tokens in ([0] * 21, [1] * 21):
            self.engine.serve(tokens)

    @precondition(lambda self: len(self.parked) + len(self.running) < 5)
    @rule(tokens=PROMPTS, data=st.data())
    def ask(self, tokens: list[int], data: st.DataObject) -> None:
        self._ask(self.engine.request(tokens), data)

    def _ask(self, request: Request, data: st.DataObject) -> None:
        engine = self.engine
        local = data.draw(st.sampled_from([0, 0, SIZE])) if request.prompt_len > 2 * SIZE else 0
        offered, parks = engine.leader.ask(request, local)
        honoured = data.draw(st.sampled_from([offered, offered, offered // SIZE // 2 * SIZE, 0]))
        chunk = data.draw(st.integers(1, request.prompt_len - local - honoured))
        engine.allocate(request, local, honoured, local + honoured + chunk)
        engine.write(request, 0, local)
        if parks:
            assert offered >= 8
            engine.newly_parked.append(request.request_id)
            self.expected.append(request.request_id)
            request.external = 0
            self.parked.append((request, local))
        else:
            self.running.append(request)
            engine.iterate((request, chunk))
            self._restart_failed()

    @rule(data=st.data(), times=st.integers(1, 2))
    def iterate(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            batch: list[tuple[Request, int]] = []
            for request in self.running:
                if request.context_current_position == len(request.tokens):
                    request.tokens.append(data.draw(st.integers(0, 1)))
                batch.append(
                    (request, data.draw(st.integers(1, len(request.tokens) - request.context_current_position)))
                )
            self.engine.iterate(*batch)
        self._restart_failed()

    def _restart_failed(self) -> None:
        """The runtime of dialect B: a parked request that failed is destroyed and admitted again."""
        while failed := [entry[0] for entry in self.parked if entry[0].request_id in self.engine.failed]:
            request = failed[0]
            self.engine.failed.discard(request.request_id)
            self.parked = [entry for entry in self.parked if entry[0] is not request]
            self.engine.restart(request)
            request.context_current_position = 0
            offered, parks = self.engine.leader.ask(request, 0)
            assert (offered, parks) == (0, False)
            self.engine.allocate(request, 0, 0, request.prompt_len)
            self.running.append(request)
            self.engine.iterate((request, request.prompt_len))

    @rule(count=st.integers(1, 3))
    def copy(self, count: int) -> None:
        for _ in range(min(count, len(self.engine.jobs))):
            self.engine.jobs.pop(0)()

    @rule()
    def late(self) -> None:
        """Everything that is on its way is over its deadline."""
        self.engine.seconds += 3.0

    def _is_waited_for(self, request: Request) -> bool:
        waiting = (*self.engine.newly_parked, *self.engine.parked_now, *self.engine.parked)
        return request.request_id in waiting

    @precondition(lambda self: any(not self._is_waited_for(request) for request, _ in self.parked))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A request that was named is in the batch again; sometimes the engine has thrown its prefix away."""
        ready = [entry for entry in self.parked if not self._is_waited_for(entry[0])]
        request, local = data.draw(st.sampled_from(ready))
        self.parked = [entry for entry in self.parked if entry[0] is not request]
        if data.draw(st.integers(0, 4)) == 0:
            request.context_current_position = local
        left = request.prompt_len - request.context_current_position
        self.running.append(request)
        self.engine.iterate((request, data.draw(st.integers(1, left))))
        self._restart_failed()

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), told=st.booleans())
    def end_while_parked(self, data: st.DataObject, told: bool) -> None:
        """Cancelled: the pages are free at once, whatever is being written into them."""
        request, _ = self.parked.pop(data.draw(st.integers(0, len(self.parked) - 1)))
        if told:
            request.is_finished_due_to_cancellation = True
            self.engine.leader.finished(request)
        self.engine.release(request)

    @precondition(lambda self: self.parked and len(self.running) < 6)
    @rule(blocks=st.integers(3, 5), ordered=st.booleans())
    def give_pages_away(self, blocks: int, ordered: bool) -> None:
        """The same without a word, and the pages go straight to a request that nothing is loaded for."""
        if ordered:
            self.engine.idle()
            self._restart_failed()
            if not self.parked:
                return
        request, _ = self.parked.pop()
        self.engine.release(request)
        self.fresh += 1
        other = self.engine.request([self.fresh] * (blocks * SIZE + 1))
        assert self.engine.prefill(other) == 0
        self.engine.go()
        self.engine.check(other, other.prompt_len)
        self.running.append(other)
        self._restart_failed()

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), told=st.booleans())
    def replay_while_parked(self, data: st.DataObject, told: bool) -> None:
        """Its allocation is destroyed. The engine goes on waiting for the id, and parks it again perhaps."""
        request, _ = self.parked.pop(data.draw(st.integers(0, len(self.parked) - 1)))
        self.engine.release(request)
        if told:
            self.engine.leader.reset(request)
        request.is_new, request.reported_tokens, request.reported_pages, request.external = True, 0, 0, 0
        request.context_current_position = 0
        if self._is_waited_for(request):
            self.engine.idle()  # the order that was given is out before it is asked about again
            self._restart_failed()
        self._ask(request, data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if request.context_current_position >= request.prompt_len:
            request.tokens.append(1)
            self.engine.finish(request)
        else:
            self.engine.release(request)

    @rule()
    def reset_cache(self) -> None:
        if not self.engine.newly_parked:  # an offer that is out fails the engine, as it must (test_identity.py)
            self.engine.leader.reset_cache()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        numbers = self.engine.leader.snapshot()
        ledger = numbers["ledger"]
        assert ledger["free"] + ledger["resident"] + ledger["pending"] + ledger["retired"] == 16
        for name in ("result_errors", "misread_reports", "batch_errors", "upkeep_errors"):
            assert name not in numbers["counts"], numbers["counts"]
        for report in self.engine.sink.reports[-3:]:
            assert report.confirmed <= report.copied <= report.honoured <= report.offered
            assert (report.outcome is Outcome.MATERIALIZED_EXACT) == (report.confirmed > 0)
        assert set(self.engine.named) <= set(self.expected)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.idle()
        while engine.jobs:
            engine.go()
        engine.idle(2)
        assert engine.parked == engine.parked_now == engine.newly_parked == []
        for request in (*self.running, *(request for request, _ in self.parked)):
            engine.release(request)
        engine.idle(FORGET_AFTER + 2 * SWEEP_EVERY)
        engine.check_balance_of(16)
        assert engine.loads._loads == {}
        keys = [(report.request_id, report.epoch) for report in engine.sink.reports]
        assert len(keys) == len(set(keys))
        counts = engine.leader.snapshot()["attempt_counts"]
        assert len(keys) == counts.get("asked", 0) - counts.get("superseded", 0)


TestParkingMachine = ParkingMachine.TestCase
TestParkingMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
