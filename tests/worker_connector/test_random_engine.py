"""Random schedules of a scripted engine: whatever it does, every page that a forward pass reads holds what a cold
prefill would have put there, no page of another request is written, and slots, leases and counts balance."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered, GenerationReset
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import Request, ScriptedEngine
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY

SIZE = 4


class EngineMachine(RuleBasedStateMachine):
    """Prompts over two tokens share prefixes; the slab holds 16 blocks, so there is always pressure."""

    @initialize(
        groups=st.sampled_from([(None,), (None, 9), (None, None)]),
        flat=st.booleans(),
    )
    def start(self, groups: tuple[int | None, ...], flat: bool) -> None:
        self.engine = ScriptedEngine(
            settings(MIB, min_offer_tokens=1, min_donor_tokens=8, max_leases=3),
            windows=groups,
            flat=flat and len(groups) == 1,
            num_pages=400,
            slots=16,
        )
        self.running: list[Request] = []
        self.asked: list[tuple[Request, int, int]] = []
        self.gone: list[Request] = []

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).flatmap(
        lambda heads: st.integers(1, SIZE).map(
            lambda rest: [t for head in heads for t in [head] * SIZE][: len(heads) * SIZE - SIZE + rest]
        )
    )

    @precondition(lambda self: len(self.running) + len(self.asked) < 4)
    @rule(tokens=prompts, salt=st.sampled_from([None, "a", "b"]), data=st.data())
    def ask(self, tokens: list[int], salt: str | None, data: st.DataObject) -> None:
        request = self.engine.request(tokens, cache_salt=salt)
        self._ask(request, data)

    def _ask(self, request: Request, data: st.DataObject) -> None:
        limit = (len(request.tokens) - 1) // SIZE
        local = offered = 0
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):  # an allocation that failed is asked for again
            local = data.draw(st.integers(0, limit)) * SIZE
            offered = self.engine.ask(request, local)
            assert offered % SIZE == 0
            assert local + offered < len(request.tokens)
        self.asked.append((request, local, offered))

    @precondition(lambda self: self.asked or self.running)
    @rule(data=st.data(), times=st.integers(1, 3))
    def iterate(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self._iterate(data)

    def _iterate(self, data: st.DataObject) -> None:
        """Some of those that wait enter, all that run go on, each with a chunk of its own; some chunks are
        overstated."""
        batch: list[tuple[Request, int]] = []
        for request, local, offered in self.asked:
            honoured = data.draw(st.integers(0, offered // SIZE)) * SIZE
            left = len(request.tokens) - local - honoured
            chunk = data.draw(st.integers(1, left))
            if not request.pages:
                request.pages = [[] for _ in self.engine.pools]
            self.engine.allocate(request, local, honoured, local + honoured + chunk)
            self.engine.write(request, 0, local)
            batch.append((request, chunk))
        for request in self.running:
            if request.context_current_position == len(request.tokens):
                request.tokens.append(data.draw(st.integers(0, 1)))
            left = len(request.tokens) - request.context_current_position
            batch.append((request, data.draw(st.integers(1, left))))
        self.running += [request for request, _, _ in self.asked]
        self.asked = []
        self.engine.iterate(*batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if request.context_current_position >= request.prompt_len:
            request.tokens.append(1)
            self.engine.finish(request)
        else:
            self.engine.release(request)  # cancelled in its prefill: nobody is told

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.gone.append(request)
        self.engine.release(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def destroy_and_replay(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.engine.release(request)
        request.prompt_len = len(request.tokens)
        request.is_new, request.reported_tokens, request.reported_pages, request.external = True, 0, 0, 0
        request.context_current_position = 0
        self._ask(request, data)

    @precondition(lambda self: self.gone)
    @rule()
    def vanish(self) -> None:
        """Long enough that the cancelled ones are forgotten; not while something runs, which would be forgotten too."""
        if not self.running and not self.asked:
            self.engine.idle(FORGET_AFTER + 2 * SWEEP_EVERY)
            self.gone.clear()
            assert self.engine.leader.snapshot()["tracked"] == 0

    @invariant()
    def memory_is_bounded_and_books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        numbers = self.engine.leader.snapshot()
        ledger = numbers["ledger"]
        assert ledger["free"] + ledger["resident"] + ledger["pending"] + ledger["retired"] == 16
        assert numbers["leases"] <= 3
        assert "result_errors" not in numbers["counts"]
        assert "misread_reports" not in numbers["counts"]
        for report in self.engine.sink.reports[-3:]:
            assert report.confirmed <= report.copied <= report.honoured <= report.offered
            assert (report.outcome is Outcome.MATERIALIZED_EXACT) == (report.confirmed > 0)

    @invariant()
    def router_s_belief_is_what_is_resident(self) -> None:
        if not hasattr(self, "engine"):
            return
        donors: dict[str, int] = {}
        for event in self.engine.sink.donor_events:
            if isinstance(event.data, GenerationReset):
                donors.clear()
            elif isinstance(event.data, DonorRegistered):
                donors[event.data.donor_id] = event.data.token_count
            elif isinstance(event.data, DonorEvicted):
                donors.pop(event.data.donor_id)
        registry = self.engine.parts.event_publisher.donors
        assert registry is not None
        assert set(donors) == set(registry._donors)
        for donor in registry._donors.values():
            assert donor.tip is not None
            assert donor.tip.resident

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request in self.running:
            self.engine.release(request)
        self.engine.idle(FORGET_AFTER + 2 * SWEEP_EVERY)
        self.engine.check_balance_of(16)
        keys = [(report.request_id, report.epoch) for report in self.engine.sink.reports]
        assert len(keys) == len(set(keys))
        counts = self.engine.leader.snapshot()["attempt_counts"]
        assert len(keys) == counts.get("asked", 0) - counts.get("superseded", 0)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis_settings(max_examples=50, stateful_step_count=25, deadline=None)
