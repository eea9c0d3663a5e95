"""Connectors that are broken on purpose, one for each way to go wrong: the schedules must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import worker_connector.leader.cache_generation
import worker_connector.leader.scheduler_output
import worker_connector.ledger.ledger
import worker_connector.ledger.plan
import worker_connector.memory.slab
import worker_connector.rank.rank
import worker_connector.rank.save_copies
import worker_connector.reference_engine
import worker_connector.requests.engine_namespace
import worker_connector.requests.load_decision
import worker_connector.requests.save_planner
from worker_connector.link.metadata import ConnectorMetadata, LoadOrder
from worker_connector.memory.copy_stream import CpuStream
from worker_connector.memory.transfer import copy_to_pages

Mutant = Callable[[pytest.MonkeyPatch], None]


def _change_orders(patch: pytest.MonkeyPatch, change: Callable[[LoadOrder], LoadOrder]) -> None:
    real = worker_connector.leader.scheduler_output.load_order

    def changed(*arguments: Any) -> LoadOrder | None:
        order = real(*arguments)
        return None if order is None else change(order)

    patch.setattr(worker_connector.leader.scheduler_output, "load_order", changed)


def loads_one_block_less(patch: pytest.MonkeyPatch) -> None:
    _change_orders(patch, lambda order: replace(order, moves=order.moves[:-1]))


def loads_from_another_slot(patch: pytest.MonkeyPatch) -> None:
    _change_orders(
        patch,
        lambda order: replace(order, moves=(*order.moves[:-1], order.moves[-1]._replace(slot=order.moves[0].slot))),
    )


def loads_into_another_page(patch: pytest.MonkeyPatch) -> None:
    def shifted(order: LoadOrder) -> LoadOrder:
        first = order.moves[0]
        return replace(
            order, moves=(first._replace(pages=(max(first.pages[0] - 1, 0), *first.pages[1:])), *order.moves[1:])
        )

    _change_orders(patch, shifted)


def loads_what_the_engine_has_itself(patch: pytest.MonkeyPatch) -> None:
    """From block 0, over pages that other requests share."""
    real = worker_connector.ledger.plan.LoadPlan.send

    def send(self: Any, computed: int, position: int, iteration: int) -> range:
        found = real(self, computed, position, iteration)
        return range(found.stop) if found else found

    patch.setattr(worker_connector.ledger.plan.LoadPlan, "send", send)


def loads_again_on_pages_of_the_past(patch: pytest.MonkeyPatch) -> None:
    """The loads of each iteration are done once more in the next one: the pages may have changed hands."""
    real = worker_connector.rank.rank.Rank.start_load
    last: list[LoadOrder] = []

    def start_load(self: Any, metadata: ConnectorMetadata | None, stream: Any) -> None:
        real(self, metadata, stream)
        for order in last:
            copy_to_pages(CpuStream(), self._geometry, self._slab, order.moves)
        last[:] = metadata.loads if metadata is not None else ()

    patch.setattr(worker_connector.rank.rank.Rank, "start_load", start_load)


def saves_a_block_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    """And takes the engine's word for it that it was."""
    real = worker_connector.requests.save_planner.SavePlanner.plan
    patch.setattr(
        worker_connector.requests.save_planner.SavePlanner,
        "progressed",
        worker_connector.requests.save_planner.SavePlanner.finished,
    )

    def plan(self: Any, request: Any) -> Any:
        scheduled = request.scheduled
        request.scheduled += self._ledger.tokens_per_block
        try:
            return real(self, request)
        finally:
            request.scheduled = scheduled

    patch.setattr(worker_connector.requests.save_planner.SavePlanner, "plan", plan)


def saves_from_the_page_before(patch: pytest.MonkeyPatch) -> None:
    real = worker_connector.rank.save_copies.copy_to_slab

    def copy(stream: Any, geometry: Any, slab: Any, moves: Any) -> None:
        real(
            stream,
            geometry,
            slab,
            [move._replace(pages=(max(move.pages[0] - 1, 0), *move.pages[1:])) for move in moves],
        )

    patch.setattr(worker_connector.rank.save_copies, "copy_to_slab", copy)


def ignores_salt_adapter_and_media(patch: pytest.MonkeyPatch) -> None:
    real = worker_connector.requests.engine_namespace.RequestNamespaces.of

    def of(self: Any, scope: Any) -> Any:
        return real(self, replace(scope, salt=None, adapter=None, multimodal=()))

    patch.setattr(worker_connector.requests.engine_namespace.RequestNamespaces, "of", of)


def offers_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        worker_connector.requests.load_decision.Question,
        "limit_blocks",
        property(lambda self: self.prompt_tokens // self.tokens_per_block),
    )


def does_not_look_at_the_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker_connector.memory.slab.HostSlab, "verify", lambda self, slots, budget=None: [])


def keeps_blocks_over_a_weight_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker_connector.leader.cache_generation.CacheGeneration, "forget_blocks", lambda self: None)


def believes_what_was_scheduled(patch: pytest.MonkeyPatch) -> None:
    """A block is taken for computed because it was scheduled: chunks that were cut afterwards, batches that were
    dropped."""
    planner = worker_connector.requests.save_planner.SavePlanner
    patch.setattr(planner, "progressed", planner.finished)
    real = worker_connector.rank.rank.Rank._drop_saves

    def drop(self: Any, metadata: ConnectorMetadata) -> None:
        if metadata.saves:
            self._save(metadata.saves, None)
        real(self, msgspec.structs.replace(metadata, saves=()))

    patch.setattr(worker_connector.rank.rank.Rank, "_drop_saves", drop)


def keeps_the_pages_of_a_destroyed_allocation(patch: pytest.MonkeyPatch) -> None:
    real = worker_connector.leader.scheduler_output.begin
    first: dict[int, Any] = {}

    def begin(data: Any, *arguments: Any, **named: Any) -> Any:
        tracked = real(data, *arguments, **named)
        tracked.pages = first.setdefault(tracked.request_id, tracked.pages)
        return tracked

    patch.setattr(worker_connector.leader.scheduler_output, "begin", begin)
    real_run = worker_connector.reference_engine.SteppedEngine.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        first.clear()  # another engine counts its requests from 1 as well
        real_run(self, *arguments, **named)

    patch.setattr(worker_connector.reference_engine.SteppedEngine, "__init__", init)


def calls_a_copy_a_confirmation(patch: pytest.MonkeyPatch) -> None:
    """Whether a forward pass came behind it or not."""
    real = worker_connector.leader.cache_generation.CacheGeneration.copied

    def copied(self: Any, done: Any) -> None:
        real(self, done)
        attempt = self.attempts.get(done.key.request_id)
        if attempt is not None and not attempt.parked:
            self._confirm(attempt)

    patch.setattr(worker_connector.leader.cache_generation.CacheGeneration, "copied", copied)


def counts_overtaken_tokens_as_reuse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker_connector.ledger.plan.LoadPlan, "overtaken", lambda self, end: None)


def never_gives_a_lease_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker_connector.ledger.ledger.Ledger, "release", lambda self, entries: None)


def frees_a_slot_twice(patch: pytest.MonkeyPatch) -> None:
    real = worker_connector.ledger.ledger.Ledger._settle

    def settle(self: Any, entry: Any) -> None:
        slot = entry.slot
        real(self, entry)
        if entry.slot != slot and slot % 5 == 0:
            self._free.append(slot)

    patch.setattr(worker_connector.ledger.ledger.Ledger, "_settle", settle)


def confirms_what_was_offered(patch: pytest.MonkeyPatch) -> None:
    """Counts what it promised, whatever became of it."""
    real = worker_connector.ledger.plan.LoadPlan.drop

    def drop(self: Any, reason: Any) -> None:
        real(self, reason)
        self.confirmed = self.copied = self.honoured = self.offered

    patch.setattr(worker_connector.ledger.plan.LoadPlan, "drop", drop)


MUTANTS: tuple[Mutant, ...] = (
    loads_one_block_less,
    loads_from_another_slot,
    loads_into_another_page,
    loads_what_the_engine_has_itself,
    loads_again_on_pages_of_the_past,
    saves_a_block_before_it_is_computed,
    saves_from_the_page_before,
    ignores_salt_adapter_and_media,
    offers_the_whole_prompt,
    does_not_look_at_the_bytes,
    keeps_blocks_over_a_weight_update,
    believes_what_was_scheduled,
    keeps_the_pages_of_a_destroyed_allocation,
    calls_a_copy_a_confirmation,
    counts_overtaken_tokens_as_reuse,
    never_gives_a_lease_back,
    frees_a_slot_twice,
    confirms_what_was_offered,
)
