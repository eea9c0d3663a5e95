"""A decoded token that completes nothing is taken on a short way: whatever the engine does, orders, books, reports and
donors are those of the long one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, SIZE, Request, ScriptedEngine
from worker_connector.leader.scheduler_output import SchedulerOutputReader
from worker_connector.link.channel import LoadDone, RankResult, SaveDone
from worker_connector.link.metadata import Orders

Step = tuple[str, int, int]
FORMS: dict[str, dict[str, Any]] = {
    "flat": {"flat": True},
    "groups": {"windows": (None, 9)},
    "dict": {"windows": (None,), "by_dict": True},
}
KINDS = (
    "decode",
    "decode",
    "decode",
    "decode",
    "lagging",
    "dropped",
    "two tokens",
    "bad token",
    "half",
    "start",
    "finish",
    "cancel",
    "replay",
    "hold",
    "let go",
    "reset",
)


class _Scripted:
    """Runs one script; `trace` is all that anybody could see of it."""

    def __init__(self, form: str) -> None:
        self.engine = ScriptedEngine(settings(MIB, **OPTIONS), num_pages=600, slots=24, **FORMS[form])
        self.running: list[Request] = []
        self.held: list[RankResult] = []
        self.holding = False
        self.trace: list[Any] = []
        self.quiet = 0
        self._saves = count()
        self._save_ids: dict[int, int] = {}
        engine: Any = self.engine
        engine.check = lambda *_: None  # some of these reports are not what was computed
        rank: Any = engine.rank
        self._post = rank._link.post
        rank._link.post = rank._saves._post = self._answer

    def _answer(self, result: RankResult) -> None:
        if self.holding and isinstance(result, (SaveDone, LoadDone)):
            self.held.append(result)
        else:
            self._post(result)

    def let_go(self) -> None:
        held, self.held = self.held, []
        for result in held:
            self._post(result)

    def step(self, kind: str, which: int, amount: int) -> None:
        if kind == "start" or not self.running:
            self._start(which, amount)
        elif kind in ("finish", "cancel"):
            request = self.running.pop(which % len(self.running))
            if kind == "finish":
                self.engine.finish(request)
            else:
                self.engine.release(request)
        elif kind == "replay":
            request = self.running.pop(which % len(self.running))
            self.engine.release(request)
            request.prompt_len = len(request.tokens)
            request.is_new, request.reported_tokens, request.reported_pages, request.external = True, 0, 0, 0
            request.context_current_position = 0
            self._prefill(request, amount)
        elif kind == "hold":
            self.holding = True
        elif kind == "let go":
            self.holding = False
            self.let_go()
        elif kind == "reset":
            self.engine.leader.reset_cache()
        else:
            self._decode(kind, which)

    def _start(self, which: int, amount: int) -> None:
        tokens = [which % 2] * (SIZE * (amount % 4)) + [amount % 3] * (1 + which % 5)
        self._prefill(self.engine.request(tokens, cache_salt="ab"[which % 2] if which % 3 == 0 else None), amount)

    def _prefill(self, request: Request, amount: int) -> None:
        offered = self.engine.ask(request, 0)
        honoured = min(amount % 3 * SIZE, offered)
        self.engine.allocate(request, 0, honoured, request.prompt_len)
        self._iterate([(request, request.prompt_len - honoured)], forward=amount % 5 != 4)
        self.running.append(request)

    def _decode(self, kind: str, which: int) -> None:
        odd = self.running[which % len(self.running)]
        for request in self.running:
            while len(request.tokens) <= request.context_current_position:
                request.tokens.append(request.request_id % 2)
        if kind == "two tokens":
            odd.tokens.append(0)
        elif kind == "bad token" and len(odd.tokens) > odd.reported_tokens:
            odd.tokens[-1] = (-1, 2**32, 1.5)[which % 3]  # type: ignore[call-overload]
        elif kind == "half":
            self._iterate([(request, 1) for request in self.running[::2]])
            return
        batch = [(request, len(request.tokens) - request.context_current_position) for request in self.running]
        at = odd.context_current_position
        if kind == "lagging":
            odd.context_current_position = max(at - 1, 0)
            batch = [(request, 1 if request is odd else scheduled) for request, scheduled in batch]
        self._iterate(batch, forward=kind != "dropped")
        if kind == "lagging":
            odd.context_current_position = max(at, odd.context_current_position)
        if kind == "bad token":  # its KV is nothing that anybody could check
            self.running.remove(odd)
            self.engine.finish(odd)

    def _iterate(self, batch: list[tuple[Request, int]], *, forward: bool = True) -> None:
        metadata = self.engine.iterate(*batch, forward=forward)
        if not forward:
            self.engine.rank.iteration_over()
        self.quiet += metadata.idle
        orders = {name: getattr(metadata, name) for name in metadata.__struct_fields__}
        for name in ("idle", "channel_id", "generation", "saves", "loads"):
            del orders[name]
        self.trace.append(orders)
        self.trace.append([(load.key, load.moves, load.plan.token_count) for load in metadata.loads])
        self.trace.append([(self._save_of(save.save_id), save.moves, save.request_id) for save in metadata.saves])
        self.note()

    def _save_of(self, save_id: int) -> int:
        """The numbers go on over all engines."""
        return self._save_ids.setdefault(save_id, next(self._saves))

    def note(self) -> None:
        life = self.engine.leader._life
        assert life is not None
        assert life.ledger is not None
        for tracked in life.running.tracked.values():
            chain = [(entry.key, entry.resident, entry.removed, entry.slot) for entry in tracked.chain]
            pending = [(pending.end, pending.landed, pending.computed) for pending in tracked.pending]
            numbers = [tracked.computed, tracked.scheduled, tracked.started, tracked.seen, len(tracked.pages)]
            flags = [tracked.saving, tracked.donates, tracked.pages.broken]
            self.trace.append((tracked.request_id, bytes(tracked.tokens), numbers, flags, chain, pending))
        snapshot = self.engine.leader.snapshot()
        del snapshot["generation"], snapshot["rank"]["counts"], snapshot["save_seconds"], snapshot["load_seconds"]
        self.trace.append({**snapshot, "counts": {name: n for name, n in snapshot["counts"].items() if n}})

    def end(self) -> None:
        self.holding = False
        self.let_go()
        for request in self.running:
            self.engine.finish(request)
        self.note()
        for report in self.engine.sink.reports:
            self.trace.append((report.request_id, report.epoch, report.outcome, report.reason, report.confirmed))
        names: dict[str, int] = {}
        for event in self.engine.sink.donor_events:
            if isinstance(event.data, (DonorRegistered, DonorEvicted)):
                donor = names.setdefault(event.data.donor_id, len(names))
                tokens = event.data.token_count if isinstance(event.data, DonorRegistered) else -1
                self.trace.append((event.event_id, donor, tokens))


def _run(form: str, script: Iterable[Step]) -> _Scripted:
    scripted = _Scripted(form)
    for step in script:
        scripted.step(*step)
    scripted.end()
    return scripted


def _run_in_full(form: str, script: Iterable[Step]) -> _Scripted:
    real = SchedulerOutputReader.read

    def read(self: SchedulerOutputReader, *arguments: Any, **named: Any) -> Orders:
        return real(self, *arguments, **named) or Orders()

    def all_of_them(self: SchedulerOutputReader, reports: Sequence[Any], iteration: int) -> list[Any]:
        return list(reports)

    with (
        mock.patch.object(SchedulerOutputReader, "read", read),
        mock.patch.object(SchedulerOutputReader, "_reports_to_read", all_of_them),
    ):
        return _run(form, script)


SERVED: tuple[Step, ...] = (("start", 1, 3), ("finish", 0, 0))
"""Of what begins like it, three blocks are offered."""
BESIDE: tuple[Step, ...] = (("start", 3, 8), ("reset", 0, 0), ("start", 1, 3), ("finish", 1, 0))
"""The same, while another request runs that saves nothing any more."""
steps = st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11))


@pytest.mark.parametrize("form", FORMS)
@given(script=st.lists(steps, min_size=5, max_size=60))
@example(script=[("start", 0, 3)] + [("decode", 0, 0)] * 9 + [("dropped", 0, 0)] + [("decode", 0, 0)] * 6)
@example(
    script=[("start", 1, 3), ("hold", 0, 0)] + [("decode", 0, 0)] * 9 + [("let go", 0, 0)] + [("decode", 0, 0)] * 9
)
@example(script=[("start", 1, 3)] * 2 + [("decode", 0, 0)] * 3 + [("bad token", 0, 0)] + [("decode", 0, 0)] * 3)
@example(script=[*SERVED, ("hold", 0, 0), ("start", 1, 19), ("let go", 0, 0)] + [("decode", 0, 0)] * 9)
@example(script=[*BESIDE, ("decode", 0, 0), ("decode", 0, 0), ("start", 1, 19)] + [("half", 0, 0)] * 9)
@example(
    script=[*SERVED, ("hold", 0, 0), ("start", 1, 7)] + [("decode", 0, 0)] * 5 + [("let go", 0, 0), ("decode", 0, 0)]
)
@example(script=[("start", 0, 4), ("start", 1, 1)] + [("decode", 0, 0), ("dropped", 1, 0), ("half", 0, 0)] * 6)
@example(script=[("start", 1, 0), ("dropped", 0, 0), ("dropped", 0, 0)] + [("decode", 0, 0)] * 9)
@hypothesis_settings(max_examples=40, deadline=None)
def test_orders_books_reports_and_donors_are_those_of_the_long_way(form: str, script: list[Step]) -> None:
    short, whole = _run(form, script), _run_in_full(form, script)
    assert short.trace == whole.trace
    assert whole.quiet == 0


def test_most_decoded_tokens_are_quiet() -> None:
    """Of one request, in blocks of four: the one that completes a block and the next one, which brings a page and
    admits the block, are not."""
    scripted = _run("dict", [("start", 1, 3)] + [("decode", 0, 0)] * 64)
    assert scripted.quiet >= 30
    reads: Counter[int] = Counter()
    real = SchedulerOutputReader._later

    def later(self: SchedulerOutputReader, data: Any, iteration: int, orders: Orders) -> None:
        reads[int(data.request_id)] += 1
        real(self, data, iteration, orders)

    with mock.patch.object(SchedulerOutputReader, "_later", later):
        _run("flat", [("start", 1, 3), ("start", 3, 3)] + [("decode", 0, 0)] * 64)
    assert len(reads) == 2
    assert max(reads.values()) <= 33
