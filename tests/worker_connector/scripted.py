"""A scripted engine: a test says what the engine does next, and every forward pass checks the bytes that it would read.

Each KV value is a function of everything that decides it (scope and all tokens up to its position), so a page that was
filled with another request's block, too early, or not at all, is found at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.worker_connector.harness import MIB, RecordingSink, settings
from worker_connector.assembly import assemble_leader_with, assemble_rank_with
from worker_connector.engine_api.engine import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    RequestData,
    SchedulerOutput,
)
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.engine_api.settings import Settings

GARBAGE = -1
SIZE = 4
"""Tokens in a block, where a test does not say otherwise."""
OPTIONS: dict[str, Any] = {"min_offer_tokens": 1, "min_donor_tokens": 4}
"""For prompts of a few blocks."""


@dataclass(eq=False)
class Request:
    """What a connector reads of a request."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    kv_hints: Any = None
    context_current_position: int = 0
    is_dummy: bool = False
    is_finished_due_to_cancellation: bool = False
    prompt_len: int = 0
    # the engine's own
    pages: list[list[int]] = field(default_factory=list)
    reported_tokens: int = 0
    reported_pages: int = 0
    external: int = 0
    is_new: bool = True

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


def llm_args(tokens_per_block: int, **changes: Any) -> SimpleNamespace:
    options: dict[str, Any] = {
        "model": "scripted",
        "revision": "1",
        "backend": "pytorch",
        "kv_cache_config": SimpleNamespace(tokens_per_block=tokens_per_block, dtype="auto", enable_block_reuse=True),
        "lora_revisions": {1: "one", 2: "two"},
    }
    return SimpleNamespace(**options | changes)


class ScriptedEngine:
    """`groups` layer groups with a pool each; group g > 0 has two regions. `windows[g]` None: full attention.

    `by_dict`: block reports are a dict by layer group id, as in dialect B; `restarts_failed`: so are failed loads
    answered. `slots`: blocks that the slab holds.
    """

    def __init__(
        self,
        it: Settings,
        *,
        tokens_per_block: int = SIZE,
        num_pages: int = 64,
        windows: Sequence[int | None] = (None,),
        flat: bool = False,
        args: Any = None,
        dp_rank: int | None = None,
        group_ids: Sequence[int] | None = None,
        by_dict: bool = False,
        restarts_failed: bool = False,
        slots: int | None = None,
    ) -> None:
        self.group_ids = list(group_ids) if group_ids is not None else list(range(len(windows)))
        self.by_dict = by_dict
        self.restarts_failed = restarts_failed
        self.size = tokens_per_block
        self.windows = windows
        self.flat = flat
        self.dp_rank = dp_rank
        self.pools = [
            torch.full((num_pages, 1 if group == 0 else 2, tokens_per_block), GARBAGE, dtype=torch.int32)
            for group in range(len(windows))
        ]
        self.free = [list(range(num_pages - 1, -1, -1)) for _ in windows]
        self.sink = RecordingSink()
        self.now = 1000.0
        args = args if args is not None else llm_args(tokens_per_block)
        self.parts = assemble_leader_with(args, it, self.sink, clock=lambda: self.now)
        self.leader = self.parts.leader
        self.rank = assemble_rank_with(args, it, inline=True, restarts_failed=restarts_failed, env={"RANK": "0"})
        self.rank.register(PoolGeometry.from_layout(self.layout()))
        if slots is not None:
            self._use_slots(slots)
        self.next_id = 1
        self.output = SchedulerOutput(attention_dp_rank=dp_rank)
        self.metadata: Any = None
        self.newly_parked: list[int] = []
        self.parked_now: list[int] = []
        self.parked: list[int] = []
        """Ids that the engine waits for."""
        self.named: list[int] = []
        """Ids that `get_finished` has named, in order."""
        self.failed: set[int] = set()

    def layout(self) -> KvCacheLayout:
        groups = []
        for group, pool in enumerate(self.pools):
            stride = pool.stride(0) * 4
            size = pool.stride(1) * 4
            regions = tuple(
                KvCacheRegion(
                    pool.data_ptr() + part * size, size, stride, len(pool), (KvCacheBufferRef(group, f"r{part}"),)
                )
                for part in range(pool.shape[1])
            )
            groups.append(KvCacheLayerGroupLayout(self.group_ids[group], (group,), self.windows[group], regions))
        return KvCacheLayout(self.size, tuple(groups), torch.int32)

    def _use_slots(self, slots: int) -> None:
        """Fewer than fit into the smallest slab that may be configured."""
        life = self.leader._life
        assert life is not None
        assert life.ledger is not None
        life.ledger._free[:] = life.ledger._free[-slots:]
        life.ledger.slots = slots

    def request(self, tokens: Sequence[int], **options: Any) -> Request:
        request = Request(self.next_id, list(tokens), **options)
        self.next_id += 1
        return request

    # the shadow model

    def value(self, request: Request, position: int, group: int, part: int) -> int:
        scope = (
            request.cache_salt,
            request.lora_task_id,
            request.multimodal_hashes,
            request.tokens[: position + 1],
            group,
            part,
        )
        return int.from_bytes(hashlib.blake2b(repr(scope).encode(), digest_size=3).digest(), "little")

    def write(self, request: Request, start: int, end: int) -> None:
        for position in range(start, end):
            for group, pool in enumerate(self.pools):
                page = request.pages[group][position // self.size]
                if page >= 0:
                    for part in range(pool.shape[1]):
                        pool[page, part, position % self.size] = self.value(request, position, group, part)

    def check(self, request: Request, end: int) -> None:
        """Everything that attention of position `end` reads is what a cold prefill would have put there."""
        for group, pool in enumerate(self.pools):
            window = self.windows[group]
            for position in range(0 if window is None else max(0, end - window + 1), end):
                page = request.pages[group][position // self.size]
                assert page >= 0, f"request {request.request_id} reads position {position} of group {group}, no page"
                for part in range(pool.shape[1]):
                    found = int(pool[page, part, position % self.size])
                    assert found == self.value(request, position, group, part), (
                        f"request {request.request_id}: wrong KV at position {position}, group {group}, part {part}"
                    )

    # what the engine does

    def ask(self, request: Request, computed: int = 0) -> int:
        return self.leader.ask(request, computed).tokens

    def allocate(self, request: Request, computed: int, honoured: int, chunk_end: int) -> None:
        """Pages up to `chunk_end` (-1 for blocks that a window has passed), and where the forward pass starts."""
        request.context_current_position = computed + honoured
        request.external = honoured
        if not request.pages:
            request.pages = [[] for _ in self.pools]
        self.grow(request, chunk_end)
        by_group: Any = (
            dict(zip(self.group_ids, request.pages, strict=True)) if self.by_dict else [list(p) for p in request.pages]
        )
        self.leader.allocated(request, *((list(request.pages[0]), None) if self.flat else ((), by_group)))

    def grow(self, request: Request, end: int) -> None:
        history = request.context_current_position
        for group, slots in enumerate(request.pages):
            window = self.windows[group]
            while len(slots) < -(-end // self.size):
                passed = window is not None and (len(slots) + 1) * self.size <= history - window + 1
                slots.append(-1 if passed else self.free[group].pop())
                if slots[-1] >= 0:
                    self.pools[group][slots[-1]] = GARBAGE

    def reclaim(self, request: Request) -> None:
        for group, slots in enumerate(request.pages):
            window = self.windows[group]
            for ordinal in range(len(slots) if window is not None else 0):
                passed = (ordinal + 1) * self.size <= request.context_current_position - (window or 0) + 1
                if passed and slots[ordinal] >= 0 and ordinal < request.reported_pages:
                    self.pools[group][slots[ordinal]] = GARBAGE
                    self.free[group].append(slots[ordinal])
                    slots[ordinal] = -1

    def data(self, request: Request, scheduled: int) -> RequestData:
        position = request.context_current_position - request.external
        request.external = 0
        pages = [slots[request.reported_pages :] for slots in request.pages]
        new_tokens = request.tokens[request.reported_tokens :]
        request.reported_pages, request.reported_tokens = len(request.pages[0]), len(request.tokens)
        if self.flat:
            return RequestData(
                request.request_id, new_tokens, pages[0], position, scheduled, cache_salt=request.cache_salt
            )
        by_group: Any = dict(zip(self.group_ids, pages, strict=True)) if self.by_dict else pages
        return RequestData(
            request.request_id,
            new_tokens,
            pages[0] if len(pages) == 1 else [],
            position,
            scheduled,
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=by_group,
        )

    def schedule(self, request: Request, scheduled: int) -> None:
        """Adds to the coming iteration. What a window has passed by then goes to whoever comes next; no report says
        so."""
        self.reclaim(request)
        self.grow(request, request.context_current_position + scheduled)
        data = self.data(request, scheduled)
        (self.output.new_requests if request.is_new else self.output.cached_requests).append(data)
        request.is_new = False

    def build(self) -> Any:
        self.output.attention_dp_rank = self.dp_rank
        self.metadata = self.leader.batch(self.output)
        self.output = SchedulerOutput()
        return self.metadata

    def iterate(self, *batch: tuple[Request, int], forward: bool = True, computes: int | None = None) -> Any:
        """One iteration with these requests. `computes`: tokens really computed of each, where they are fewer than were
        scheduled."""
        for request, scheduled in batch:
            self.schedule(request, scheduled)
        metadata = self.build()
        self.parked_now, self.newly_parked = [*self.parked_now, *self.newly_parked], []
        self.rank.start_load(metadata, None)
        if self.restarts_failed:
            failed = self.rank.take_failed()
            for request, _ in batch:
                if request.request_id in failed:
                    self.restart(request)
            batch = tuple(entry for entry in batch if entry[0].request_id not in failed)
        if forward and batch:
            for request, scheduled in batch:
                done = scheduled if computes is None else computes
                start = request.context_current_position
                self.check(request, start)
                self.write(request, start, start + done)
                request.context_current_position += done
            self.rank.forward_done(metadata, None)
        self.poll()
        return metadata

    def poll(self) -> list[int]:
        """`get_finished`: each id once, and only one that is parked."""
        parked, self.parked_now = self.parked_now, []
        self.parked.extend(
            request_id for request_id in parked if request_id not in self.parked
        )  # by id, as the runtime
        named = self.rank.finished_loads(parked)
        for request_id in named:
            self.parked.remove(request_id)
        self.named.extend(named)
        self.failed.update(self.rank.take_failed_parked())
        return named

    def park(self, request: Request, *, honoured: int | None = None, computed: int = 0, chunk: int = 64) -> int:
        """Ask for an asynchronous load and allocate; the next iteration sends it. Returns what was offered."""
        tokens, is_async = self.leader.ask(request, computed)
        assert is_async, "the offer is synchronous"
        assert tokens > 0
        honoured = tokens if honoured is None else honoured
        self.newly_parked.append(request.request_id)
        self.allocate(request, computed, honoured, min(computed + honoured + chunk, request.prompt_len))
        request.external = 0  # said in the parking iteration, which reports nothing of this request
        return tokens

    def resume(self, request: Request, *, at: int | None = None) -> None:
        """The parked request is back in a batch, and its forward pass starts at `at`, else where it was served to."""
        if at is not None:
            request.context_current_position = at
        self.iterate((request, request.prompt_len - request.context_current_position))

    def prefill(
        self, request: Request, *, computed: int = 0, honoured: int | None = None, chunk: int | None = None
    ) -> int:
        """Ask, allocate and prefill to the end of the prompt; returns what was offered."""
        offered = self.ask(request, computed)
        honoured = offered if honoured is None else honoured
        step = chunk if chunk is not None else request.prompt_len
        end = min(computed + honoured + step, request.prompt_len)
        self.allocate(request, computed, honoured, end)
        while request.context_current_position < request.prompt_len:
            self.iterate((request, min(step, request.prompt_len - request.context_current_position)))
        return offered

    def decode(self, request: Request, tokens: Sequence[int]) -> None:
        """Each token is sampled, then computed."""
        for token in tokens:
            request.tokens.append(token)
            self.iterate((request, 1))

    def finish(self, request: Request) -> None:
        self.leader.finished(request)
        self.release(request)

    def release(self, request: Request) -> None:
        """Pages go back and are overwritten by whoever comes next; without `finish`, as for a cancelled request."""
        for group, slots in enumerate(request.pages):
            for slot in slots:
                if slot >= 0:
                    self.free[group].append(slot)
                    self.pools[group][slot] = GARBAGE
        request.pages = []

    def restart(self, request: Request) -> None:
        """The allocation is destroyed, and the connector told; the request is admitted again later."""
        self.release(request)
        self.leader.reset(request)
        request.is_new, request.reported_tokens, request.reported_pages = True, 0, 0

    def serve(self, tokens: Sequence[int], **options: Any) -> Request:
        """A whole request: prefill, one token, end."""
        request = self.request(tokens, **options)
        self.prefill(request)
        request.tokens.append(1)
        self.finish(request)
        return request

    def idle(self, iterations: int = 1) -> None:
        for _ in range(iterations):
            self.iterate()

    def report_of(self, request: Request) -> Any:
        (found,) = [report for report in self.sink.reports if report.request_id == request.request_id]
        return found

    def check_balance(self) -> None:
        self.check_balance_of(self.leader.snapshot()["ledger"]["slots"] if self.leader.snapshot()["ledger"] else 0)

    def check_balance_of(self, slots: int) -> None:
        """Nothing runs, so nothing is leased, pending or tracked."""
        numbers = self.leader.snapshot()
        assert numbers["leases"] == numbers["tracked"] == numbers["finishing"] == numbers["open_saves"] == 0, numbers
        assert "result_errors" not in numbers["counts"], numbers
        ledger = numbers["ledger"]
        if ledger is not None:
            assert ledger["free"] + ledger["resident"] == slots, ledger
            assert ledger["pending"] == ledger["leased"] == ledger["retired"] == 0, ledger
        ids = [event.event_id for event in self.sink.donor_events]
        assert ids == list(range(len(ids)))


def make(**options: Any) -> ScriptedEngine:
    """With a slab of 256 blocks (a row is padded to 4 KiB)."""
    return ScriptedEngine(settings(MIB, **OPTIONS), **options)
