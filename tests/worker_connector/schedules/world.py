"""World: the reference engine stepped by hand, our connector attached, and what must hold after every step of any
schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dynamo_semkv.contracts.donor_events import DonorEvicted, DonorRegistered, GenerationReset
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB, Bench, RecordingSink, settings
from tests.worker_connector.schedules.tape import Tape
from worker_connector.engine_api.request_view import RequestScope, unpack_tokens
from worker_connector.leader.cache_generation import OFFER_PATIENCE, CacheGeneration
from worker_connector.leader.leader import IDLE_SECONDS
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.memory.copy_stream import Blocks, CpuStream
from worker_connector.reference_engine import Behaviours, EngineConfig, SteppedEngine
from worker_connector.reference_engine.engine.scheduler import reuse_scope

SIZE = 4
"""Tokens in a block."""
SCOPES: tuple[dict[str, Any], ...] = (
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"lora_task_id": 1},
    {"lora_task_id": 2},
    {"multimodal_hashes": ((1,) * 8,)},
)
Attach = Callable[[Bench], Any]
"""Bench -> ConnectorSpec: the connector under test, or one that is broken on purpose."""


class Broken(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str, *details: object) -> None:
    if not holds:
        raise Broken(f"{what}: {', '.join(map(str, details))}" if details else what)


class FailingStream(CpuStream):
    """Some copies into pages fail, half done."""

    def __init__(self, tape: Tape, rate: float) -> None:
        self._tape, self._rate = tape, rate

    def to_pages(self, pages: torch.Tensor, rows: torch.Tensor, blocks: Blocks) -> None:
        if self._tape.hits("failed_copy", self._rate):
            half = len(blocks) // 2
            super().to_pages(pages, rows, Blocks(blocks.slots[:half], blocks.pages[:half]))
            raise OSError("the copy failed")
        super().to_pages(pages, rows, blocks)


class World:
    """`config`: fields of the engine beside those below; `slots`, `max_leases`, `async_load_min_tokens`: of the
    connector. `failed_copy_rate`: of dialect B only, where a failed load restarts its request.
    """

    def __init__(
        self,
        tape: Tape,
        attach: Attach = Bench.spec,
        *,
        slots: int = 16,
        max_leases: int = 3,
        async_load_min_tokens: int | None = None,
        behaviours: Behaviours | None = None,
        failed_copy_rate: float = 0.0,
        **config: Any,
    ) -> None:
        self.now = 1000.0
        self.bench = Bench(
            settings(
                MIB,
                min_offer_tokens=1,
                min_donor_tokens=2 * SIZE,
                max_leases=max_leases,
                async_load_min_tokens=async_load_min_tokens,
            ),
            clock=lambda: self.now,
            restarts_failed=behaviours is not None and behaviours.dialect == "B",
        )
        options: dict[str, Any] = {"tokens_per_block": SIZE, "poison_pages": True, "lora_seeds": {1: 1, 2: 2}}
        options |= {"behaviours": behaviours or Behaviours()}
        self.engine = SteppedEngine(EngineConfig(**options | config), attach(self.bench), dice=tape)
        self.tape = tape
        self.copies: list[Callable[[], None]] = []
        """Of parked loads, that have not begun."""
        loads = self.bench.rank._loads
        assert loads is not None
        loads._run, loads._clock, loads._step = self.copies.append, lambda: self.now, 1
        if self.bench.restarts_failed:
            self.bench.rank._stream = loads._ahead = loads._side = FailingStream(tape, failed_copy_rate)
        self.leader = self.bench.leader
        self.slots, self.max_leases = slots, max_leases
        ledger = self.ledger
        ledger._free[:] = ledger._free[-slots:]
        ledger.slots = slots
        self.submitted: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.cancelled: set[int] = set()
        self.damaged: set[int] = set()
        self.stalled = False
        """Requests were taken for gone that were not. Their bytes must be right all the same; their numbers begin
        anew."""
        self.steps = 0
        self.seen: Counter[str] = Counter()
        self._read = 0
        self._expected: dict[bytes, Any] = {}
        self._scopes = [self._scope(scope) for scope in SCOPES]

    @property
    def _life(self) -> CacheGeneration:
        life = self.leader._life
        assert life is not None
        return life

    @property
    def ledger(self) -> Ledger:
        ledger = self._life.ledger
        assert ledger is not None
        return ledger

    def _scope(self, scope: dict[str, Any]) -> tuple[bytes, Any]:
        """(digest of its namespace, how the engine tells its KV apart)"""
        namespaces = self.leader._namespaces
        assert namespaces is not None
        media = tuple("".join(f"{word:08x}" for word in words) for words in scope.get("multimodal_hashes", ()))
        request = RequestScope(scope.get("cache_salt"), True, scope.get("lora_task_id"), media)
        plain: Any = SimpleNamespace(cache_salt=None, lora_task_id=None, multimodal_hashes=None)
        vars(plain).update(scope)
        return namespaces.of(request)[1], reuse_scope(plain)

    # what happens

    def submit(self, tokens: Sequence[int], new_tokens: int, scope: int = 0) -> int:
        request_id = self.engine.submit(list(tokens), max_new_tokens=new_tokens, **SCOPES[scope])
        self.submitted[request_id] = (list(tokens), SCOPES[scope])
        return request_id

    def cancel(self, request_id: int) -> None:
        self.engine.cancel(request_id)
        self.cancelled.add(request_id)

    def step(self) -> None:
        self.engine.step()
        self.steps += 1
        self.check()

    def copy(self) -> None:
        """The oldest parked load that waits is copied."""
        if self.copies:
            self.copies.pop(0)()

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.is_idle:
                return
            self.copy()
            self.step()
        raise Broken(f"requests {sorted(self.engine.running)} never end")

    def damage(self, slot: int, byte: int) -> None:
        """A bit of the slab flips. Only in sealed rows, since what is being written is written anyway, and not between
        the promise and its load: what is damaged then and not found is what the connector does not claim to catch."""
        slab, entry = self.bench.rank.slab, self.ledger.by_slot(slot)
        assert slab is not None
        promised = any(entry in tip.chain() for tip in self.ledger._leased)
        if entry is not None and not promised and slab._checked[slot]:
            slab.rows[slot, byte % slab.bytes_per_block] ^= 16
            self.damaged.add(slot)

    def update_weights(self) -> None:
        """Nothing runs; all KV of before is another model's."""
        self.run()
        self.engine.model._seed += 1
        self.engine.model._roots.clear()
        self._expected.clear()
        self.engine.reset_prefix_cache()
        self.leader.reset_cache()

    def pass_time(self) -> None:
        """The beat of an engine that has not iterated for long: it runs nothing, or it is stalled and will go on."""
        self.stalled |= bool(self.engine.running)
        while self.copies:
            self.copy()
        self.now += IDLE_SECONDS + 1
        self.leader.sweep_idle()
        self.leader.restate_if_due()

    # what must hold

    def check(self) -> None:
        require(not self.engine.faults, "pages", *self.engine.faults[:3])
        life, counts, ledger = self._life, self.leader.counts, self.ledger.stats()
        require(not self.bench.schedulers[0].faults, "a callback raised", self.bench.schedulers[0].faults)
        for name in (
            "result_errors",
            "misread_reports",
            "batch_errors",
            "upkeep_errors",
            "unloadable",
        ):
            require(not counts.get(name), name, counts)
        # A replay that is not asked about has more tokens than the question that it had once.
        require(counts.get("tokens_differ", 0) <= counts.get("unasked_replay", 0), "tokens_differ", counts)
        slots = ledger.free + ledger.resident + ledger.pending + ledger.retired
        require(slots == self.slots, "slots are lost or made", ledger)
        leases = life.attempts.leases
        require(0 <= leases <= self.max_leases, "leases", leases)
        require(bool(leases) or not ledger.leased, "a block is leased by nobody", ledger)
        alive = len(self.engine.running) + len(self.cancelled) + self.tape.happened["lost_finish"]
        for name, found in (("attempts", len(life.attempts)), ("tracked requests", len(life.running))):
            require(found <= alive, f"{name} outlive their requests", found, alive)
        self._check_reports()
        if self.steps % 8 == 0:
            self.check_slab()

    def _check_reports(self) -> None:
        fresh = RecordingSink(self.bench.sink.messages[self._read :])
        self._read += len(fresh.messages)
        alive = {request.request_id: request for request in self.engine.executor.requests} if fresh.messages else {}
        for report in fresh.reports:
            numbers = (report.confirmed, report.copied, report.honoured, report.offered)
            require(list(numbers) == sorted(numbers), "confirmed <= copied <= honoured <= offered", report)
            confirmed = report.outcome is Outcome.MATERIALIZED_EXACT
            require(confirmed == (report.confirmed > 0), "an outcome that its counts do not bear", report)
            runs = alive.get(report.request_id)
            ran = runs is None or runs._cached_noted or not self._is_told_who_runs
            require(not confirmed or ran, "confirmed before its pass", report)
            require(report.local_tokens + report.offered < report.prompt_tokens, "the whole prompt", report)

    @property
    def _is_told_who_runs(self) -> bool:
        """An engine that reports its batch before it trims it does not say who was left out."""
        return not (self.engine.config.behaviours.report_before_trim and self.tape.happened["trim"])

    def check_slab(self) -> None:
        """Whatever may be offered is what a cold prefill writes."""
        slab = self.bench.rank.slab
        assert slab is not None
        for entry in self.ledger.entries():
            if entry.resident and entry.slot not in self.damaged:
                row = slab.rows[entry.slot, : slab.bytes_per_block].numpy().view(np.uint32)
                require(bool((row == self._words(entry)).all()), f"block {entry.ordinal} in slot {entry.slot}")
        self.damaged &= {entry.slot for entry in self.ledger.entries()}

    def _words(self, entry: BlockEntry) -> Any:
        found = self._expected.get(entry.key)
        if found is None:
            found = self._expected[entry.key] = self._cold(entry)
        return found

    def _cold(self, entry: BlockEntry) -> Any:
        scope = next((scope for digest, scope in self._scopes if digest == entry.digest), None)
        require(scope is not None, "a block of a namespace that nobody asked for")
        tokens = unpack_tokens(b"".join(block.tokens for block in entry.chain())).tolist()
        words = self.engine.model.words(scope, tokens)[-SIZE:].transpose(1, 2, 0, 3)
        return np.concatenate([words[list(pages.group.layers)].ravel() for pages in self.engine.pool.groups])

    def check_end(self) -> None:
        """Everything has ended: nothing is held, every request had its answer, every question its report."""
        self.run()
        for _ in range(3):
            self.pass_time()
        life = self._life
        life.sweep(
            life.iteration + 10 * OFFER_PATIENCE
        )  # offers whose requests were cancelled before their first batch
        self.check()
        self.check_slab()
        self.bench.check_balance(numbers_of_attempts=not self.stalled)
        for request_id, (prompt, scope) in self.submitted.items():
            self._check_answer(request_id, prompt, scope)
        self._check_donors()
        counts = self.bench.rank.counts
        if not (counts["repeated_loads"] or counts["load_errors"] or self.tape.happened["failed_copy"]):
            honoured = sum(report.honoured for report in self.bench.sink.reports)
            require(counts["loaded_blocks"] * SIZE <= honoured, "more was loaded than taken", counts, honoured)
        numbers = self.leader.snapshot()
        self.seen.update(numbers["counts"])
        self.seen.update(numbers["attempt_counts"])
        self.seen.update({f"saves_{name}": count for name, count in numbers["saves"].items()})
        self.seen.update(evicted=numbers["ledger"]["evicted"], loaded_blocks=self.bench.rank.counts["loaded_blocks"])
        self.seen.update(self.tape.happened)
        self.seen.update(report.outcome.value for report in self.bench.sink.reports)

    def _check_answer(self, request_id: int, prompt: list[int], scope: dict[str, Any]) -> None:
        ended = self.engine.ended[request_id]
        require(ended.finish_reason in ("length", "cancelled"), "an ending", request_id, ended.finish_reason)
        require(ended.finish_reason == "length" or request_id in self.cancelled, "cancelled by nobody", request_id)
        if self.engine.model._seed == 0:
            plain: Any = SimpleNamespace(cache_salt=None, lora_task_id=None, multimodal_hashes=None)
            vars(plain).update(scope)
            tokens = list(prompt)
            for found in ended.token_ids:
                expected = self.engine.model.next_token(reuse_scope(plain), tokens)
                require(found == expected, "another answer than a cold one", request_id, ended.token_ids)
                tokens.append(found)
        reports = [report for report in self.bench.sink.reports if report.request_id == request_id]
        behaviours, happened = self.engine.config.behaviours, self.tape.happened
        replays = happened["destroyed_allocation"] or (behaviours.dropped_batch_reverts and happened["dropped_batch"])
        if ended.finish_reason == "cancelled" and self._is_told_who_runs and not replays:
            served = ended.stats.connector_served_tokens if ended.stats is not None else 0
            require(all(report.confirmed <= served for report in reports), "confirmed without a pass", reports, served)
        if ended.finish_reason == "length" and not (self.leader.counts["vanished"] or self.stalled):
            require(bool(reports), "no report", request_id)
            if not replays and any(report.outcome is Outcome.LOAD_FAILED for report in reports[:-1]):
                reports = reports[-1:]  # what came before was restarted, and computed again
            served = ended.stats.connector_served_tokens if ended.stats is not None else 0
            confirmed = [report.confirmed for report in reports]
            if replays:  # the engine's number is that of the first allocation that ran
                require(not served or served in confirmed, "served and not confirmed", reports, served)
            else:
                require(confirmed == [served], "confirmed is not what the engine was served", reports, served)

    def _check_donors(self) -> None:
        """What a router believes is what is there."""
        believed: set[str] = set()
        for event in self.bench.sink.donor_events:
            if isinstance(event.data, GenerationReset):
                believed.clear()
            elif isinstance(event.data, DonorRegistered):
                believed.add(event.data.donor_id)
            elif isinstance(event.data, DonorEvicted):
                believed.discard(event.data.donor_id)
        registry = self.bench.schedulers[0]._parts.event_publisher.donors
        assert registry is not None
        require(believed == set(registry._donors), "donors that a router believes in and we do not, or the other way")
        for donor in registry._donors.values():
            require(donor.tip is not None and donor.tip.resident, "a donor without its blocks", donor.donor_id)
