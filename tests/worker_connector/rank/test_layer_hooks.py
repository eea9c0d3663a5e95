"""Loads that each layer waits for alone: only where the hooks were trusted and seen, and never without a full wait or a
failed pass otherwise (ai-dynamo/dynamo#3297: a graph replay skips the hooks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.rank.test_late_copies import TOKENS, ManualStream
from tests.worker_connector.scripted import ScriptedEngine
from worker_connector.engine_api.engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import LoadFailed
from worker_connector.memory.slab import HostSlab
from worker_connector.memory.transfer import Move, copy_to_pages, copy_to_slab, load_by_layer
from worker_connector.rank.layer_hooks import LayerHooks

LAYERS = (0, 1, 2)


class Ticket:
    def __init__(self) -> None:
        self.held: list[Any] = []

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def hold(self, engine_stream: Any) -> None:
        self.held.append(engine_stream)


def seen(hooks: LayerHooks, came: tuple[int, ...], tickets: dict[int, Ticket] | None = None) -> bool:
    """One pass with loads."""
    hooks.pass_begins()
    hooks.loads_begin(tickets)
    for layer in came:
        hooks.before_layer(layer, "engine")
    return hooks.pass_done()


def test_hooks_are_relied_on_when_trusted_and_seen_in_full() -> None:
    for trusted, layers, came, reliable in (
        (False, LAYERS, LAYERS, False),
        (True, (), LAYERS, False),
        (True, LAYERS, (), False),
        (True, LAYERS, (0, 1), False),
        (True, LAYERS, (0, 2, 1), False),
        (True, LAYERS, (1, 2, 3), False),
        (True, LAYERS, LAYERS, True),
    ):
        hooks = LayerHooks(layers, trusted=trusted)
        assert not hooks.reliable
        assert seen(hooks, came)
        assert hooks.reliable is reliable


def test_a_pass_without_loads_proves_nothing() -> None:
    hooks = LayerHooks(LAYERS, trusted=True)
    hooks.pass_begins()
    for layer in LAYERS:
        hooks.before_layer(layer, "engine")
    assert hooks.pass_done()
    assert not hooks.reliable


def test_each_layer_waits_for_its_own_ticket_and_a_missed_one_ends_the_trust() -> None:
    hooks = LayerHooks(LAYERS, trusted=True)
    seen(hooks, LAYERS)
    tickets = {layer: Ticket() for layer in LAYERS}
    assert seen(hooks, LAYERS, tickets)
    assert [ticket.held for ticket in tickets.values()] == [["engine"]] * 3
    assert hooks.reliable
    assert not seen(hooks, (0, 1), {layer: Ticket() for layer in LAYERS})
    assert not hooks.reliable
    assert seen(hooks, LAYERS)
    assert not hooks.reliable


def test_hooks_that_come_while_a_graph_is_recorded_do_not_count() -> None:
    hooks = LayerHooks(LAYERS, trusted=True)
    seen(hooks, LAYERS)
    ticket = Ticket()
    hooks.loads_begin({0: ticket, 1: Ticket(), 2: Ticket()})
    for layer in LAYERS:
        hooks.before_layer(layer, "engine", recording=True)
    assert ticket.held == []
    assert not hooks.pass_done()


@pytest.mark.parametrize("form", ["tensor", "one region", "a region per layer", "keys and values apart"])
def test_loads_by_layer_bring_the_same_bytes_in_the_order_of_the_layers(form: str) -> None:
    pool = torch.randint(0, 256, (6, 3, 2, 16), dtype=torch.uint8)
    geometry = geometry_of(form, pool)
    assert geometry.layers == LAYERS
    assert sum(plane.size for plane in geometry.by_layer) == geometry.bytes_per_block
    slab = HostSlab(4, geometry.bytes_per_block)
    moves = [Move(2, (5,)), Move(0, (1,))]
    stream = ManualStream()
    copy_to_slab(stream, geometry, slab, moves)
    stream.land()
    before = pool.clone()
    pool.zero_()
    tickets = load_by_layer(stream, geometry, slab, moves)
    assert tuple(tickets) == LAYERS
    by_order = stream.waiting
    landed = stream.landed
    for layer in LAYERS:  # what a layer's ticket stands for is enough for that layer
        until = tickets[layer]._until - landed
        for target, source in by_order[:until]:
            target.copy_(source)
        assert torch.equal(pool[[5, 1], layer], before[[5, 1], layer])
    if form != "keys and values apart":
        assert [tickets[layer]._until - landed for layer in LAYERS] == [2, 4, 6]
    again = torch.zeros_like(pool)
    other = geometry_of(form, again)
    copy_to_pages(stream, other, slab, moves)
    stream.land()
    assert torch.equal(again, pool)


def geometry_of(form: str, pool: torch.Tensor) -> PoolGeometry:
    pages, layers, _, size = pool.shape
    if form == "tensor":
        return PoolGeometry.from_tensor(pool, 8)
    stride = pool.stride(0)

    def region(offset: int, length: int, *buffers: tuple[int, str]) -> KvCacheRegion:
        named = tuple(KvCacheBufferRef(layer, role) for layer, role in buffers)
        return KvCacheRegion(pool.data_ptr() + offset, length, stride, pages, named)

    if form == "one region":
        every = [(layer, role) for layer in range(layers) for role in ("key", "value")]
        regions = [region(0, stride, *every)]
    elif form == "a region per layer":
        regions = [
            region(layer * 2 * size, 2 * size, (layer, "key"), (layer, "value")) for layer in reversed(range(layers))
        ]
    else:  # layer 0's keys alone; all the rest in one region that cannot be cut by layer
        rest = [(0, "value"), (1, "key"), (1, "value"), (2, "key"), (2, "value")]
        regions = [region(0, size, (0, "key")), region(size, stride - size, *rest)]
    group = KvCacheLayerGroupLayout(0, tuple(range(layers)), None, tuple(regions))
    return PoolGeometry.from_layout(KvCacheLayout(8, (group,)))


def test_pool_that_does_not_name_its_layers_is_never_loaded_by_layer() -> None:
    pool = torch.zeros((4, 16), dtype=torch.uint8)
    regions = (KvCacheRegion(pool.data_ptr(), 16, 16, 4, ()),)
    geometry = PoolGeometry.from_layout(KvCacheLayout(8, (KvCacheLayerGroupLayout(0, (0,), None, regions),)))
    assert geometry.layers == ()
    assert not LayerHooks(geometry.layers, trusted=True).reliable


class Layered:
    """A scripted engine of three layers that calls the hooks, and whose copies are late from `go_late` on."""

    def __init__(self, **options: Any) -> None:
        it = settings(MIB, min_offer_tokens=1, min_donor_tokens=4, **({"trust_layer_hooks": True} | options))
        self.engine = ScriptedEngine(it, windows=(None, None, None), num_pages=128)
        self.stream = ManualStream()

    def go_late(self) -> None:
        self.engine.rank._stream = self.stream

    def load(self, tokens: list[int]) -> Any:
        """A request whose blocks are loaded, up to its forward pass."""
        engine = self.engine
        request = engine.request(tokens)
        offered = engine.ask(request)
        engine.allocate(request, 0, offered, len(tokens))
        engine.schedule(request, len(tokens) - offered)
        metadata = engine.build()
        engine.rank.start_load(metadata, "engine")
        return request

    def run_pass(self, layers: tuple[int, ...] = LAYERS) -> None:
        for layer in layers:
            self.engine.rank.before_layer(layer, "engine")
        self.engine.rank.forward_done(self.engine.metadata, "engine")

    def prove(self) -> None:
        self.engine.serve(TOKENS)
        self.load(TOKENS)
        self.run_pass()


def test_a_pass_waits_for_all_loads_until_its_hooks_were_seen() -> None:
    layered = Layered()
    layered.engine.serve(TOKENS)
    layered.go_late()
    layered.load(TOKENS)
    assert layered.stream.log[-1] == "before"
    layered.stream.land()
    layered.run_pass()
    layered.stream.log.clear()
    request = layered.load(TOKENS)
    assert "before" not in layered.stream.log
    layered.run_pass()
    holds = [entry for entry in layered.stream.log if entry.startswith("hold")]
    assert len(holds) == len(set(holds)) == 3  # each layer another ticket
    layered.stream.land()
    layered.engine.rank.poll()
    layered.engine.check(request, 40)
    assert layered.engine.report_of(request).confirmed == 40


def test_not_trusted_means_a_full_wait_for_ever() -> None:
    layered = Layered(trust_layer_hooks=False)
    layered.prove()
    layered.go_late()
    layered.load(TOKENS)
    assert layered.stream.log[-1] == "before"


def test_a_pass_that_skipped_a_hook_fails_and_saves_nothing() -> None:
    layered = Layered()
    layered.prove()
    layered.go_late()
    layered.load([*TOKENS[:20], *range(100, 140)])
    assert layered.engine.metadata.saves
    with pytest.raises(LoadFailed, match="trust_layer_hooks"):
        layered.run_pass((0, 1))
    layered.stream.land()
    layered.engine.rank.poll()
    rank, numbers = layered.engine.rank, layered.engine.leader.snapshot()
    assert rank.counts["layer_hooks_missed"] == 1
    assert numbers["open_saves"] == 0
    layered.stream.log.clear()
    layered.load(TOKENS)
    assert layered.stream.log[-1] == "before"


def test_a_pass_that_never_came_is_made_up_for_by_a_full_wait() -> None:
    """The batch became empty behind `start_load`: nobody waited for the copies, and the next pass reads those pages."""
    layered = Layered()
    layered.prove()
    layered.go_late()
    layered.load(TOKENS)
    layered.stream.log.clear()
    layered.engine.rank.start_load(None, "engine")
    assert layered.stream.log == ["before"]
    layered.engine.rank.forward_done(layered.engine.metadata, "engine")  # it came after all, and had waited
    assert layered.engine.rank.counts["layer_hooks_missed"] == 0


def test_a_fault_by_layer_costs_nothing_but_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    layered = Layered()
    layered.prove()
    layered.go_late()

    def fail(*_: Any) -> None:
        raise RuntimeError("no ticket")

    monkeypatch.setattr("worker_connector.rank.rank.load_by_layer", fail)
    request = layered.load(TOKENS)
    assert layered.stream.log[-1] == "before"
    layered.stream.land()
    layered.run_pass()
    layered.engine.rank.poll()
    layered.engine.check(request, 40)
    assert layered.engine.report_of(request).confirmed == 40
