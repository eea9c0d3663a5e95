"""Ledger: residence, leases, eviction and the lateness of freed slots, against a plain model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dynamo_semkv.contracts.keys import BlockKey, block_keys
from worker_connector.engine_api.request_view import pack_tokens
from worker_connector.ledger import ledger as ledger_module
from worker_connector.ledger.block import BlockEntry, Chain, Segment
from worker_connector.ledger.ledger import Ledger, MatchEnd

SIZE = 2
A, B = b"a" * 32, b"b" * 32


def fill(ledger: Ledger, digest: bytes, tokens: list[int]) -> list[BlockEntry]:
    """Every full block of the tokens becomes resident."""
    path: list[BlockEntry] = []
    raw = pack_tokens(tokens)
    for at in range(0, len(raw) - len(raw) % (4 * SIZE), 4 * SIZE):
        block = raw[at : at + 4 * SIZE]
        parent = path[-1] if path else None
        entry = ledger.child(digest, parent, block)
        if entry is None:
            entry = ledger.enter(digest, parent, block)
            if entry is None:
                break
            ledger.landed(entry)
            ledger.admit(entry)
        path.append(entry)
    if path:
        ledger.touch(path[-1])
    return path


def test_keys_are_the_contract_s() -> None:
    ledger = Ledger(8, SIZE)
    tokens = [5, 6, 7, 8, 9]
    assert [entry.key for entry in fill(ledger, A, tokens)] == block_keys(A, tokens, SIZE)


def test_match_is_the_resident_chain_up_to_the_limit() -> None:
    ledger = Ledger(8, SIZE)
    fill(ledger, A, [1, 2, 3, 4, 5, 6])
    assert len(ledger.match(A, pack_tokens([1, 2, 3, 4, 9, 9]), 3).path) == 2
    found = ledger.match(A, pack_tokens([1, 2, 3, 4, 5, 6]), 2)
    assert (len(found.path), found.end) == (2, MatchEnd.LIMIT)
    assert ledger.match(A, pack_tokens([1]), 5).end is MatchEnd.LIMIT
    assert ledger.match(B, pack_tokens([1, 2, 3, 4]), 2).path == []


def walked(ledger: Ledger, tokens: list[int], limit: int) -> list[BlockEntry]:
    """What `match` finds, block by block."""
    raw, path = pack_tokens(tokens), list[BlockEntry]()
    while len(path) < min(limit, len(tokens) // SIZE):
        at = len(path) * 4 * SIZE
        child = ledger.child(A, path[-1] if path else None, raw[at : at + 4 * SIZE])
        if child is None or not child.resident:
            break
        path.append(child)
    return path


@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_match_of_many_blocks_is_the_one_of_each(data: st.DataObject) -> None:
    """Prompts that share a beginning and part at any block, blocks removed, evicted and entered again in between."""
    ledger = Ledger(240, SIZE)
    head = list(range(2 * 100))
    prompts = [head[:n] + [1000 + n] * m for n, m in ((200, 0), (200, 60), (150, 80), (131, 90), (2, 200), (30, 3))]
    paths: list[BlockEntry] = []
    pending: list[BlockEntry] = []
    for _ in range(14):
        tokens = data.draw(st.sampled_from(prompts))
        what = data.draw(st.sampled_from(["fill", "fill", "save", "admit", "remove", "match"]))
        if what == "fill" and not pending:
            paths += fill(ledger, A, tokens)
        elif what == "save":
            pending += save(ledger, tokens, data.draw(st.integers(1, 70)))
        elif what == "admit":
            for entry in pending[: data.draw(st.integers(1, 70))]:
                pending.remove(entry)
                if not entry.removed:
                    ledger.admit(entry)
        elif what == "remove" and paths:
            ledger.remove(data.draw(st.sampled_from(paths)))
        limit = data.draw(st.sampled_from([0, 1, 70, 100, 1000]))
        found = ledger.match(A, pack_tokens(tokens), limit)
        path = walked(ledger, tokens, limit)
        assert (found.path, found.blocks) == (path, len(path))
        if path:
            first = data.draw(st.integers(0, len(path) - 1))
            assert list(Chain(path[-1]).slots(first)) == [entry.slot for entry in path[first:]]
        check_segments(ledger)


def save(ledger: Ledger, tokens: list[int], blocks: int) -> list[BlockEntry]:
    """Enters as many blocks as that behind what is there of the tokens; they land, and wait to be admitted."""
    raw, entered, at = pack_tokens(tokens), list[BlockEntry](), 0
    parent: BlockEntry | None = None
    while at < len(raw) - 4 * SIZE and len(entered) < blocks:
        block, at = raw[at : at + 4 * SIZE], at + 4 * SIZE
        entry = ledger.child(A, parent, block)
        if entry is None:
            entry = ledger.enter(A, parent, block)
            if entry is None:
                break
            ledger.landed(entry)
            entered.append(entry)
        parent = entry
    return entered


def check_segments(ledger: Ledger) -> None:
    """Each block stands where its segment says, with its tokens and its slot, and what is resident stands in front."""
    segments: dict[int, Segment] = {}
    for entry in ledger.entries():
        segment = entry.segment
        assert segment is not None
        segments[id(segment)] = segment
        assert segment.blocks[entry.ordinal - segment.start] is entry
    for segment in segments.values():
        assert b"".join(entry.tokens for entry in segment.blocks) == segment.tokens
        assert [entry.slot for entry in segment.blocks] == list(segment.slots)
        assert all(later.parent is entry for entry, later in zip(segment.blocks, segment.blocks[1:], strict=False))
        assert [entry.resident for entry in segment.blocks] == [
            index < segment.resident for index in range(len(segment.blocks))
        ]
    assert sum(len(segment.blocks) for segment in segments.values()) == len(list(ledger.entries()))


def test_a_chain_knows_its_blocks_also_when_they_are_removed() -> None:
    ledger = Ledger(8, SIZE)
    path = fill(ledger, A, [1, 2, 3, 4, 5, 6])
    chain = Chain(path[-1])
    ledger.lease(path[-1])
    ledger.remove(path[1])
    fill(ledger, A, [1, 2, 7, 7, 8, 8])
    assert (list(chain), len(chain), chain[-1]) == (path, 3, path[-1])
    ledger.release(path[-1])


def test_pending_blocks_are_not_matched() -> None:
    ledger = Ledger(8, SIZE)
    entry = ledger.enter(A, None, pack_tokens([1, 2]))
    assert entry is not None
    found = ledger.match(A, pack_tokens([1, 2, 3]), 1)
    assert (found.path, found.end) == ([], MatchEnd.NOT_RESIDENT)
    with pytest.raises(ValueError, match="before its copy"):
        ledger.admit(entry)


def test_child_is_admitted_after_its_parent() -> None:
    ledger = Ledger(8, SIZE)
    parent = ledger.enter(A, None, pack_tokens([1, 2]))
    assert parent is not None
    child = ledger.enter(A, parent, pack_tokens([3, 4]))
    assert child is not None
    ledger.landed(child)
    with pytest.raises(ValueError, match="parent"):
        ledger.admit(child)


def test_equal_key_with_other_tokens_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key only proposes: with a broken hash nothing of another prompt is matched, and nothing is overwritten."""
    monkeypatch.setattr(ledger_module, "child_key", lambda parent, tokens: BlockKey(b"k" * 16))
    ledger = Ledger(8, SIZE)
    fill(ledger, A, [1, 2])
    found = ledger.match(A, pack_tokens([7, 8]), 1)
    assert (found.path, found.end) == ([], MatchEnd.TOKENS_DIFFER)
    assert ledger.enter(A, None, pack_tokens([7, 8])) is None
    assert len(ledger.match(A, pack_tokens([1, 2]), 1).path) == 1
    assert ledger.stats().collisions == 2


def test_least_recently_used_leaf_goes_first() -> None:
    ledger = Ledger(4, SIZE)
    fill(ledger, A, [1, 2, 3, 4])
    fill(ledger, A, [5, 6, 7, 8])
    ledger.touch(ledger.match(A, pack_tokens([1, 2, 3, 4]), 2).tip)
    fill(ledger, A, [9, 9])
    assert [entry.tokens for entry in ledger.take_departed()] == [pack_tokens([7, 8])]
    fill(ledger, A, [8, 8])
    assert [entry.tokens for entry in ledger.take_departed()] == [pack_tokens([5, 6])]


def test_entering_never_evicts_the_parent_itself() -> None:
    ledger = Ledger(1, SIZE)
    (only,) = fill(ledger, A, [1, 2])
    assert ledger.enter(A, only, pack_tokens([3, 4])) is None
    assert not only.removed
    assert ledger.stats().refused == 1
    assert fill(ledger, A, [5, 6])  # and it can still go for another chain
    assert only.removed


def test_refused_entry_leaves_no_root_behind() -> None:
    ledger = Ledger(1, SIZE)
    (only,) = fill(ledger, A, [1, 2])
    ledger.lease(only)
    assert ledger.enter(B, None, pack_tokens([1, 2])) is None
    assert B not in ledger._roots
    ledger.release(only)


def test_removed_block_keeps_its_slot_while_leased_or_in_flight() -> None:
    ledger = Ledger(2, SIZE)
    (leased,) = fill(ledger, A, [1, 2])
    flying = ledger.enter(A, leased, pack_tokens([3, 4]))
    assert flying is not None
    ledger.lease(leased)
    ledger.remove(leased)
    assert leased.removed
    assert flying.removed
    assert ledger.stats().free == 0
    assert ledger.enter(A, None, pack_tokens([5, 6])) is None
    ledger.landed(flying)
    ledger.release(leased)
    assert ledger.stats().free == 2


def test_release_without_a_lease_is_an_error() -> None:
    ledger = Ledger(2, SIZE)
    (entry,) = fill(ledger, A, [1, 2])
    with pytest.raises(ValueError, match="no lease"):
        ledger.release(entry)


def test_what_is_removed_cannot_be_leased() -> None:
    ledger = Ledger(2, SIZE)
    (entry,) = fill(ledger, A, [1, 2])
    ledger.remove(entry)
    with pytest.raises(ValueError, match="removed"):
        ledger.lease(entry)


def test_a_lease_covers_the_chain_before_it_also_when_it_is_removed_from_its_end() -> None:
    """First the end goes, then the middle, then all: no slot is free before the lease ends, and none is kept after
    it."""
    ledger = Ledger(4, SIZE)
    first, second, third = fill(ledger, A, [1, 2, 3, 4, 5, 6])
    ledger.lease(third)
    ledger.lease(second)
    for removed in (third, second, first):
        ledger.remove(removed)
        assert (ledger.stats().free, ledger.stats().leased) == (1, 3)
    ledger.release(second)
    assert (ledger.stats().free, ledger.stats().leased) == (1, 3)
    ledger.release(third)
    assert (ledger.stats().free, ledger.stats().leased) == (4, 0)
    assert not ledger._roots


def test_what_continued_a_block_leaves_it_as_young_as_it_was_itself() -> None:
    """Only the end of a chain is marked as used."""
    ledger = Ledger(4, SIZE)
    fill(ledger, A, [1, 2, 3, 4])
    fill(ledger, A, [5, 6])
    ledger.touch(ledger.match(A, pack_tokens([1, 2, 3, 4]), 2).tip)
    ledger.remove(ledger.match(A, pack_tokens([1, 2, 3, 4]), 2).path[1])
    ledger.take_departed()
    fill(ledger, A, [7, 7, 8, 8, 9, 9])
    assert [entry.tokens for entry in ledger.take_departed()] == [pack_tokens([5, 6])]


class Watched(Ledger):
    """Also notes the use of each block of a chain, and not only of its last one."""

    def __init__(self, slots: int, tokens_per_block: int) -> None:
        super().__init__(slots, tokens_per_block)
        self.used: dict[BlockEntry, int] = {}

    def touch(self, tip: BlockEntry | None) -> None:
        super().touch(tip)
        for entry in tip.chain() if tip is not None else ():
            self.used[entry] = self.tick

    def enter(
        self, digest: bytes, parent: BlockEntry | None, tokens: bytes, *, used_before: int | None = None
    ) -> BlockEntry | None:
        entry = super().enter(digest, parent, tokens, used_before=used_before)
        if entry is not None:
            self.used[entry] = self.tick
        return entry


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes"):
        Ledger(2, SIZE).enter(A, None, pack_tokens([1]))


class LedgerMachine(RuleBasedStateMachine):
    """Random prompts over a tiny alphabet, so that chains share prefixes; leases, copies that end late, removals,
    pressure."""

    leases = Bundle("leases")
    flights = Bundle("flights")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Watched(6, SIZE)
        self.leased: list[list[BlockEntry]] = []
        self.flying: list[BlockEntry] = []
        self.resident: set[BlockKey] = set()

    prompts = st.lists(st.integers(0, 1), min_size=2, max_size=8)

    def settle(self) -> None:
        for entry in self.ledger.take_departed():
            self.resident.discard(entry.key)

    @rule(digest=st.sampled_from([A, B]), tokens=prompts)
    def save(self, digest: bytes, tokens: list[int]) -> None:
        before = {entry.key for entry in self.ledger.entries() if entry.resident}
        for entry in fill(self.ledger, digest, tokens):
            if entry.resident:
                before.add(entry.key)
        self.resident = before
        self.settle()

    @rule(target=leases, digest=st.sampled_from([A, B]), tokens=prompts)
    def lease(self, digest: bytes, tokens: list[int]) -> list[BlockEntry]:
        path = self.ledger.match(digest, pack_tokens(tokens), 4).path
        if path:
            self.ledger.lease(path[-1])
        self.leased.append(path)
        return path

    @rule(path=consumes(leases))
    def release(self, path: list[BlockEntry]) -> None:
        if path:
            self.ledger.release(path[-1])
        self.leased.remove(path)

    @rule(target=flights, digest=st.sampled_from([A, B]), token=st.integers(10, 15))
    def enter(self, digest: bytes, token: int) -> BlockEntry | None:
        block = pack_tokens([token, token])
        entry = None if self.ledger.child(digest, None, block) else self.ledger.enter(digest, None, block)
        if entry is not None:
            self.flying.append(entry)
        self.settle()
        return entry

    @rule(entry=consumes(flights), withdrawn=st.booleans())
    def land(self, entry: BlockEntry | None, withdrawn: bool) -> None:
        if entry is None:
            return
        self.flying.remove(entry)
        if withdrawn:
            self.ledger.remove(entry)
        self.ledger.landed(entry)
        if not entry.removed:
            self.ledger.admit(entry)
            self.resident.add(entry.key)

    @rule(digest=st.sampled_from([A, B]), tokens=prompts, at=st.integers(0, 3))
    def remove(self, digest: bytes, tokens: list[int], at: int) -> None:
        path = self.ledger.match(digest, pack_tokens(tokens), 4).path
        if path:
            self.ledger.remove(path[at % len(path)])
        self.settle()

    @invariant()
    def slots_are_owned_once_and_accounted_for(self) -> None:
        stats = self.ledger.stats()
        held = list(self.ledger._by_slot)
        assert len(held) + stats.free == stats.slots
        assert not set(held) & set(self.ledger._free)
        assert stats.resident + stats.pending + stats.retired == len(held)

    @invariant()
    def what_departed_is_what_is_missing(self) -> None:
        assert {entry.key for entry in self.ledger.entries() if entry.resident} == self.resident

    @invariant()
    def leased_and_flying_blocks_keep_their_slots(self) -> None:
        for path in self.leased:
            for entry in path:
                assert self.ledger.by_slot(entry.slot) is entry
        assert self.ledger.stats().leased == len({id(entry) for path in self.leased for entry in path})
        for entry in self.flying:
            assert self.ledger.by_slot(entry.slot) is entry

    @invariant()
    def residents_are_reachable_from_the_root(self) -> None:
        for entry in self.ledger.entries():
            chain = entry.chain()
            raw = b"".join(link.tokens for link in chain)
            if entry.resident:
                assert self.ledger.match(entry.digest, raw, len(chain)).path == chain
        check_segments(self.ledger)

    @invariant()
    def what_may_be_evicted_is_as_old_as_its_last_use(self) -> None:
        for entry in self.ledger.entries():
            assert entry.children or entry.tick == self.ledger.used[entry]

    @invariant()
    def what_may_be_evicted_is_in_the_queue(self) -> None:
        queued = {id(entry) for _, _, entry in self.ledger._queue}
        for entry in self.ledger.entries():
            assert not self.ledger._evictable(entry) or id(entry) in queued

    @invariant()
    def leases_are_counted_at_the_ends(self) -> None:
        """Of each lease: at the last block of its chain and, as far up as all is removed, at each one and the one
        before."""
        due: Counter[BlockEntry] = Counter()
        for path in self.leased:
            for entry in reversed(path):
                due[entry] += 1
                if not entry.removed:
                    break
        known = {*self.ledger.entries(), *due}
        assert all(entry.leases == due[entry] for entry in known)

    def teardown(self) -> None:
        for path in self.leased:
            if path:
                self.ledger.release(path[-1])
        for entry in self.flying:
            self.ledger.landed(entry)
        self.ledger.clear()
        stats = self.ledger.stats()
        assert (stats.free, stats.resident, stats.retired) == (stats.slots, 0, 0)
        assert not self.ledger._roots


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
