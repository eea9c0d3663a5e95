"""Pages, references and eviction under random use, and the KV events that describe them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.worker_connector.reference_engine.event_mirror import Mirror
from worker_connector.engine_api.engine import BAD_PAGE_INDEX
from worker_connector.reference_engine import LlamaConfig
from worker_connector.reference_engine.engine import reuse
from worker_connector.reference_engine.engine.block_manager import BlockManager, BlockSequence
from worker_connector.reference_engine.engine.events import KvEventBuffer
from worker_connector.reference_engine.engine.reuse import ReuseScope
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.layer_groups import LayerGroup, layer_groups

SIZE = 4
SMALL = LlamaConfig(
    vocab_size=2,
    hidden_size=2,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    max_position_embeddings=64,
)


ONE_GROUP = layer_groups(2)
WINDOWS = layer_groups(2, (64, 6), sink_tokens=3, max_seq_len=64)
"""Full attention, and a window that leaves one block after the first behind it."""


def manager(
    num_blocks: int, reuse_on: bool = True, groups: tuple[LayerGroup, ...] = ONE_GROUP
) -> tuple[BlockManager, KvEventBuffer]:
    events = KvEventBuffer(0, [group.window or 64 for group in groups], 100_000)
    pool = KvPool(SMALL, num_blocks, SIZE, groups=groups)
    return BlockManager(pool, events, enable_block_reuse=reuse_on), events


def run(blocks: BlockManager, tokens: list[int], scope: ReuseScope | None = None, priority: int | None = None) -> int:
    """Open, compute and close a sequence; returns the tokens that were reused."""
    sequence = blocks.open(tokens, scope or ReuseScope(), len(tokens), priority)
    assert sequence is not None
    reused = len(sequence.slots) * SIZE
    blocks.grow(sequence, len(tokens))
    blocks.commit(sequence, tokens, len(tokens))
    blocks.close(sequence)
    return reused


@dataclass
class Live:
    tokens: list[int]
    scope: ReuseScope
    limit: int
    sequence: BlockSequence
    computed: int


class BlockManagerMachine(RuleBasedStateMachine):
    """Random sequences over two tokens, so that prefixes collide all the time, on ten pages."""

    NUM_BLOCKS = 10
    GROUPS = ONE_GROUP

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.events = manager(self.NUM_BLOCKS, groups=self.GROUPS)
        self.live: list[Live] = []
        self.mirror = Mirror(SIZE)
        #: What each page holds: the whole token prefix up to its end, as a forward pass or nobody would have left it.
        self.contents: dict[tuple[int, int], tuple[ReuseScope, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18),
        extra=st.integers(0, 10),
        salt=st.sampled_from([None, "", "a"]),
        priority=st.sampled_from([None, 10, 35, 90]),
    )
    def open(self, tokens: list[int], extra: int, salt: str | None, priority: int | None) -> None:
        scope = ReuseScope(cache_salt=salt)
        sequence = self.blocks.open(tokens, scope, len(tokens) + extra, priority)
        if sequence is None:
            return
        reused = sequence.num_blocks * SIZE
        assert reused < len(tokens)
        self.live.append(Live(tokens, scope, len(tokens) + extra, sequence, reused))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), step=st.integers(1, 9))
    def compute(self, data: st.DataObject, step: int) -> None:
        """Prefill or decode some tokens, then commit."""
        live = data.draw(st.sampled_from(self.live))
        end = min(live.computed + step, live.limit)
        live.tokens += [data.draw(st.integers(0, 1)) for _ in range(end - len(live.tokens))]
        before = [list(slots) for slots in live.sequence.by_group]
        self.blocks.grow(live.sequence, end, live.computed)
        for slots, old in zip(live.sequence.by_group, before, strict=True):
            assert all(slot in (was, BAD_PAGE_INDEX) for slot, was in zip(slots, old, strict=False))
        for group, slots in enumerate(live.sequence.by_group):
            for index in range(live.computed // SIZE, end // SIZE):
                if slots[index] != BAD_PAGE_INDEX:
                    self.contents[group, slots[index]] = (live.scope, tuple(live.tokens[: (index + 1) * SIZE]))
        live.computed = end
        self.blocks.commit(live.sequence, live.tokens, end)
        self.blocks.pass_window(live.sequence, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        self.blocks.close(live.sequence)

    @rule()
    def drop_cached(self) -> None:
        self.blocks.drop_cached()
        assert self.blocks.tree.num_evictable == 0

    @invariant()
    def pages_balance(self) -> None:
        held = {
            (group, slot)
            for live in self.live
            for group, slots in enumerate(live.sequence.by_group)
            for slot in slots
            if slot != BAD_PAGE_INDEX
        }
        assert self.blocks.num_referenced == len(held)
        assert self.blocks.num_free + self.blocks.tree.num_evictable + len(held) == self.blocks.num_pages
        for group in range(len(self.GROUPS)):
            assert sum(live.sequence.groups[group].reserved for live in self.live) <= self._free(group)

    def _free(self, group: int) -> int:
        return len(self.blocks._free[group]) + self.blocks.tree.evictable(group)

    @invariant()
    def a_page_has_one_owner_or_one_content(self) -> None:
        for live in self.live:
            for group, slots in zip(self.GROUPS, live.sequence.by_group, strict=True):
                stale = group.stale_blocks(live.computed, SIZE)
                for index, slot in enumerate(slots[: live.computed // SIZE]):
                    assert (slot == BAD_PAGE_INDEX) == (index in stale)
                    if slot != BAD_PAGE_INDEX:
                        page = self.contents[group.group_id, slot]
                        assert page == (live.scope, tuple(live.tokens[: (index + 1) * SIZE]))

    @invariant()
    def events_describe_the_tree(self) -> None:
        self.events.flush()
        events = self.events.drain()
        if len(self.GROUPS) > 1:  # a window's events may name parents without a page
            events = [event for event in events if event["layer_group_id"] == 0]
            for event in events:
                event["event_id"] = self.mirror.next_id + events.index(event)
        self.mirror.apply(events)
        assert len(self.mirror.blocks) == len(self.blocks.tree)
        for block_hash in self.mirror.blocks:
            self.mirror.chain(block_hash)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class WindowMachine(BlockManagerMachine):
    """The same with a second group, which has a window and a sink."""

    GROUPS = WINDOWS


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = TestBlockManagerMachine.settings


def test_tokens_are_the_proof_and_the_hash_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash equal nothing wrong is shared."""
    monkeypatch.setattr(reuse, "chain_hash", lambda parent, tokens: 7)
    blocks, _ = manager(16)
    assert run(blocks, [0] * 9) == 0
    assert run(blocks, [1] * 9) == 0
    assert run(blocks, [0] * 9) == 4  # the second block collided with the first and was not stored


@pytest.mark.parametrize(
    "other",
    [ReuseScope(cache_salt="a"), ReuseScope(cache_salt=""), ReuseScope(lora_task_id=0), ReuseScope(multimodal=b"x")],
)
def test_scopes_never_share(other: ReuseScope) -> None:
    blocks, _ = manager(16)
    assert run(blocks, [0] * 9) == 0
    assert run(blocks, [0] * 9, other) == 0
    assert run(blocks, [0] * 9, other) == 8
    assert other.seed() != ReuseScope().seed()


def test_scope_fields_do_not_run_into_each_other() -> None:
    seeds = {ReuseScope("a", None, b"b").seed(), ReuseScope("ab", None, b"").seed(), ReuseScope(None, 1).seed()}
    assert len(seeds) == 3


def test_lower_priority_is_evicted_first_then_the_least_recently_used() -> None:
    blocks, _ = manager(6)
    kept, old, new = [0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]
    run(blocks, kept, priority=90)
    run(blocks, old)
    run(blocks, new)
    run(blocks, old)  # most recent now
    run(blocks, [1, 0] * 8)  # four blocks: evicts two of the three
    assert [run(blocks, tokens) for tokens in (kept, old, new)] == [4, 0, 0]


def test_a_leaf_goes_before_its_ancestors() -> None:
    """Even where the ancestor has the lower priority."""
    blocks, _ = manager(4)
    run(blocks, [0] * 5, priority=10)
    run(blocks, [0] * 9)
    run(blocks, [1] * 12)  # three pages, two are free
    assert run(blocks, [0] * 9) == 4


def test_an_evicted_prefix_takes_its_reachable_rest_along() -> None:
    """Two equal prompts at once: the second keeps its own pages, and chains new blocks below the first one's."""
    blocks, events = manager(8)
    first = blocks.open([0] * 8, ReuseScope(), 12)
    second = blocks.open([0] * 8, ReuseScope(), 12)
    assert first is not None
    assert second is not None
    for sequence in (first, second):
        blocks.grow(sequence, 8)
        blocks.commit(sequence, [0] * 8, 8)
    assert set(first.slots).isdisjoint(second.slots)
    assert len(blocks.tree) == 2
    blocks.grow(second, 12)
    blocks.commit(second, [0] * 8 + [1] * 4, 12)
    assert len(blocks.tree) == 3
    blocks.close(first)
    blocks.drop_cached()
    assert len(blocks.tree) == 0
    assert blocks.num_referenced == 3
    blocks.close(second)
    assert blocks.num_free == 8
    events.flush()
    mirror = Mirror(SIZE)
    mirror.apply(events.drain())
    assert mirror.blocks == {}


def test_nothing_is_stored_below_an_evicted_prefix() -> None:
    """The first sequence's blocks, below which the second one would chain, are gone when it gets there."""
    blocks, events = manager(8)
    first = blocks.open([0] * 8, ReuseScope(), 8)
    second = blocks.open([0] * 8, ReuseScope(), 12)
    assert first is not None
    assert second is not None
    for sequence in (first, second):
        blocks.grow(sequence, 8)
        blocks.commit(sequence, [0] * 8, 8)
    blocks.close(first)
    blocks.drop_cached()
    blocks.grow(second, 12)
    blocks.commit(second, [0] * 12, 12)
    assert len(blocks.tree) == 0
    blocks.close(second)
    assert blocks.num_free == 8
    events.flush()
    assert [event["data"]["type"] for event in events.drain()] == ["created", "stored", "removed"]


def test_reviving_cached_pages_counts_against_reservations() -> None:
    """Two pages are free, two cached; a reservation of two leaves two, so four cannot be promised, cached or not."""
    blocks, _ = manager(4)
    run(blocks, [0] * 8)
    holder = blocks.open([1] * 4, ReuseScope(), 8)
    assert holder is not None
    assert blocks.open([0] * 9, ReuseScope(), 16) is None
    blocks.close(holder)
    assert blocks.open([0] * 9, ReuseScope(), 16) is not None


def test_hits_without_evictions_do_not_grow_the_eviction_order() -> None:
    blocks, _ = manager(8)
    for _ in range(500):
        run(blocks, [0] * 16)
    assert len(blocks.tree._idle[0]) < 100


def test_poisoned_pages_are_poisoned_again_when_they_change_hands() -> None:
    pool = KvPool(SMALL, 2, SIZE, poison=True)
    blocks = BlockManager(pool, KvEventBuffer(0, 64, 0))
    sequence = blocks.open([0] * 4, ReuseScope(), 8)
    assert sequence is not None
    pool.tensor.zero_()
    blocks.grow(sequence, 4)
    assert pool.tensor[sequence.slots[0]].isnan().all()
    assert not torch.isnan(pool.tensor).all()
