"""Copies that land late, as on a GPU: nothing is confirmed, freed or reused before they have (TensorRT-LLM#19378,
vllm-ascend#16662)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dynamo_semkv.contracts.report import Outcome, Reason
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import ScriptedEngine
from worker_connector.leader.cache_generation import FORGET_AFTER, SWEEP_EVERY
from worker_connector.memory.copy_stream import Blocks, copy_pairs

SECONDS_A_COPY = 0.25


class ManualStream:
    """Copies happen when the test says so, and each takes `SECONDS_A_COPY` of the stream's own time. Records the order
    against the engine's stream."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.log: list[str] = []
        self.handed = 0
        self.landed = 0

    def after(self, engine_stream: Any) -> None:
        self.log.append("after")

    def before(self, engine_stream: Any) -> None:
        self.log.append("before")

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        self._copies((page, row) for page, row in copy_pairs(pages, rows, blocks))

    def to_rows(self, rows: torch.Tensor, pages: torch.Tensor, blocks: Blocks) -> None:
        self._copies((row, page) for page, row in copy_pairs(pages, rows, blocks))

    def _copies(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            self.log.append("copy")
            self.waiting.append((target, source))
            self.handed += 1

    def recording(self) -> bool:
        return False

    def prepare(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        return None

    def ticket(self) -> ManualTicket:
        return ManualTicket(self, self.handed)

    def mark(self) -> ManualTicket:
        return self.ticket()

    def land(self) -> None:
        for target, source in self.waiting:
            target.copy_(source)
        self.landed += len(self.waiting)
        self.waiting.clear()


class ManualTicket:
    def __init__(self, stream: ManualStream, until: int) -> None:
        self._stream = stream
        self._until = until

    def done(self) -> bool:
        return self._stream.landed >= self._until

    def wait(self) -> None:
        assert self.done(), "the keeper waits in its own thread; a test lands first"

    def seconds_since(self, earlier: ManualTicket) -> float:
        assert earlier.done()
        assert self.done(), "what has not happened yet has no time"
        return (self._until - earlier._until) * SECONDS_A_COPY

    def hold(self, engine_stream: Any) -> None:
        self._stream.log.append(f"hold {self._until}")


class ManualKeeper:
    failed = 0

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()

    def close(self) -> None:
        return None


class Late:
    """A scripted engine whose copies are late from `go_late` on."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(settings(MIB, min_offer_tokens=1, min_donor_tokens=4))
        self.stream = ManualStream()
        self.keeper = ManualKeeper()

    def go_late(self) -> None:
        self.engine.rank._stream = self.engine.rank._save_stream = self.stream
        self.engine.rank._keeper = self.keeper  # type: ignore[assignment]

    def ask_and_schedule(self, tokens: list[int]) -> Any:
        """A request with a load in flight; the forward pass is the test's."""
        request = self.engine.request(tokens)
        offered = self.engine.ask(request)
        self.engine.allocate(request, 0, offered, len(tokens))
        self.engine.schedule(request, len(tokens) - offered)
        metadata = self.engine.build()
        self.engine.rank.start_load(metadata, None)
        return request


TOKENS = list(range(41))


def test_load_is_ordered_between_the_engine_s_passes() -> None:
    late = Late()
    late.engine.serve(TOKENS)
    late.go_late()
    late.ask_and_schedule(TOKENS)
    assert late.stream.log[0] == "before"  # earlier saves, before this pass may write their pages
    assert late.stream.log[1] == "after"
    assert late.stream.log[-1] == "before"
    assert set(late.stream.log[2:-1]) == {"copy"}


def test_save_is_ordered_behind_the_pass_and_before_the_next() -> None:
    late = Late()
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.engine.write(request, 0, 41)
    late.stream.log.clear()
    late.engine.rank.forward_done(late.engine.metadata, None)
    assert late.stream.log[0] == "after"
    assert set(late.stream.log[1:]) == {"copy"}
    late.engine.rank.start_load(None, None)
    assert late.stream.log[-1] == "before"


def test_copied_is_said_when_it_landed_and_confirmed_only_with_the_pass() -> None:
    late = Late()
    late.engine.serve(TOKENS)
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.engine.rank.forward_done(late.engine.metadata, None)
    late.engine.rank.poll()
    assert late.engine.leader.snapshot()["leases"] == 1
    assert not [r for r in late.engine.sink.reports if r.request_id == request.request_id]
    late.stream.land()
    late.engine.rank.poll()
    assert late.engine.report_of(request).confirmed == 40
    assert late.engine.leader.snapshot()["leases"] == 0
    late.engine.check(request, 40)


def test_lease_of_a_cancelled_request_outlives_it_until_the_copy_has_landed() -> None:
    """Abort in flight: the report says cancelled at once, the slots stay until the DMA is done, and are released
    once."""
    late = Late()
    late.engine.serve(TOKENS)
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.engine.leader._life.attempts.forget(request.request_id)  # type: ignore[union-attr]
    assert late.engine.report_of(request).outcome is Outcome.CANCELLED
    assert late.engine.leader.snapshot()["leases"] == 1
    assert late.engine.leader.snapshot()["ledger"]["leased"] == 10
    late.stream.land()
    late.engine.rank.poll()
    assert late.engine.leader.snapshot()["leases"] == 0
    assert late.engine.leader.snapshot()["ledger"]["leased"] == 0
    assert late.engine.report_of(request).outcome is Outcome.CANCELLED


def test_replay_while_the_first_load_still_runs() -> None:
    late = Late()
    late.engine.serve(TOKENS)
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.engine.release(request)
    request.is_new, request.reported_tokens, request.reported_pages, request.context_current_position = True, 0, 0, 0
    offered = late.engine.ask(request)
    late.engine.allocate(request, 0, offered, 41)
    late.engine.schedule(request, 1)
    late.engine.rank.start_load(late.engine.build(), None)
    late.engine.rank.forward_done(late.engine.metadata, None)
    late.stream.land()
    late.engine.rank.poll()
    late.engine.check(request, 40)
    reports = [r for r in late.engine.sink.reports if r.request_id == request.request_id]
    assert [(r.epoch, r.outcome, r.confirmed) for r in reports] == [
        (0, Outcome.CANCELLED, 0),
        (1, Outcome.MATERIALIZED_EXACT, 40),
    ]
    assert late.engine.leader.snapshot()["leases"] == 0


def test_saved_blocks_are_offered_once_landed_and_sealed() -> None:
    late = Late()
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.engine.write(request, 0, 41)
    late.engine.rank.forward_done(late.engine.metadata, None)
    request.tokens.append(1)
    late.engine.leader.finished(request)
    assert late.engine.leader.snapshot()["finishing"] == 1
    assert late.engine.ask(late.engine.request(TOKENS)) == 0
    late.stream.land()
    assert late.engine.ask(late.engine.request(TOKENS)) == 0  # landed, not sealed
    late.keeper.run()
    assert late.engine.ask(late.engine.request(TOKENS)) == 40
    assert late.engine.leader.snapshot()["finishing"] == 0
    assert late.engine.leader.snapshot()["donors"] == 1


def test_slots_of_a_withdrawn_save_are_not_given_away_before_it_landed() -> None:
    late = Late()
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.engine.rank.forward_done(late.engine.metadata, None)
    request.is_finished_due_to_cancellation = True
    late.engine.leader.finished(request)
    ledger = late.engine.leader.snapshot()["ledger"]
    assert (ledger["resident"], ledger["pending"], ledger["retired"]) == (0, 0, 10)
    assert ledger["free"] == ledger["slots"] - 10
    late.stream.land()
    late.keeper.run()
    assert late.engine.leader.snapshot()["ledger"]["free"] == ledger["slots"]


def test_forward_pass_that_never_came_is_told_when_the_copy_is_there() -> None:
    late = Late()
    late.engine.serve(TOKENS)
    late.go_late()
    request = late.ask_and_schedule(TOKENS)
    late.stream.land()
    late.engine.rank.poll()
    late.engine.idle(FORGET_AFTER + SWEEP_EVERY)
    report = late.engine.report_of(request)
    assert (report.copied, report.confirmed, report.reason) == (40, 0, Reason.CANCELLED)
