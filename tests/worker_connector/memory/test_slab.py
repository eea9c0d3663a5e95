"""HostSlab and its seals: what is offered is what was saved."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dynamo_semkv.config.host_memory import Available
from worker_connector.errors import Refused
from worker_connector.memory.checksum import ROW_BYTES, padded, seals
from worker_connector.memory.slab import Budget, HostSlab, slots_for
from worker_connector.memory.slab_scrubber import Scrubber, SlabScrubber


def filled(slots: int = 8, size: int = 5000) -> HostSlab:
    slab = HostSlab(slots, size)
    random = np.random.default_rng(0)
    slab.rows.numpy()[:] = random.integers(0, 256, slab.rows.shape, dtype=np.uint8)
    slab.break_seals(range(slots))
    slab.seal(range(slots))
    return slab


@hypothesis_settings(deadline=None)
@given(st.integers(0, 2 * ROW_BYTES - 1), st.integers(1, 255), st.integers(0, 7))
def test_one_changed_byte_changes_the_seal(at: int, difference: int, slot: int) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (8, 2 * ROW_BYTES), dtype=np.uint8)
    before = seals(blocks)
    blocks[slot, at] ^= difference
    after = seals(blocks)
    assert [index for index in range(8) if before[index] != after[index]] == [slot]


def test_exchanged_words_rows_and_blocks_change_the_seal() -> None:
    block = np.random.default_rng(2).integers(0, 256, (1, 3 * ROW_BYTES), dtype=np.uint8)
    words = block.view(np.uint64)
    (before,) = seals(block)
    for left, right in ((0, 1), (0, 512), (5, 1029)):
        changed = words.copy()
        changed[0, [left, right]] = changed[0, [right, left]]
        assert seals(changed.view(np.uint8))[0] != before
    rows = block.reshape(3, ROW_BYTES)
    assert seals(rows[[1, 0, 2]].reshape(1, -1))[0] != before
    assert seals(np.zeros((1, ROW_BYTES), np.uint8))[0] == 0


def test_many_blocks_at_once_have_the_seals_of_each() -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (5, ROW_BYTES), dtype=np.uint8)
    assert list(seals(blocks)) == [seals(blocks[index : index + 1])[0] for index in range(5)]


@pytest.mark.parametrize(("count", "rows"), [(3, 7), (5, 2), (1, 1)])
def test_seals_do_not_depend_on_the_steps_in_which_they_are_computed(
    count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = np.random.default_rng(4).integers(0, 256, (count, rows * ROW_BYTES), dtype=np.uint8)
    at_once = list(seals(blocks))
    for step in (1, 2, 3, 7):
        monkeypatch.setattr("worker_connector.memory.checksum.STEP_ROWS", step)
        assert list(seals(blocks)) == at_once


def test_rows_are_whole_pages_of_words() -> None:
    assert [padded(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_nothing_is_offered_before_it_is_sealed() -> None:
    slab = HostSlab(4, 100)
    assert slab.verify([0, 3]) == [0, 3]
    slab.break_seals([0])
    slab.seal([0])
    assert slab.verify([0, 3]) == [3]
    slab.break_seals([0])
    assert slab.verify([0]) == [0]
    assert slab.damaged([0]) == []


def test_damage_is_found_in_the_block_and_nowhere_else() -> None:
    slab = filled()
    slab.rows[5, 17] ^= 1
    assert slab.verify(range(8)) == [5]
    assert slab.damaged([4, 5, 6]) == [5]


def test_scattered_slots_are_checked_like_neighbours() -> None:
    slab = filled()
    slab.rows[6, 0] ^= 1
    assert slab.verify([7, 1, 6, 2, 3]) == [6]
    assert slab.verify([]) == []


def test_budget_goes_round_all_blocks() -> None:
    """A long prompt's blocks are checked in turn: damage is found after as many offers as the budget needs for one
    round."""
    slab = filled(slots=8)
    slab.rows[6, 3] ^= 1
    found = [slab.verify(range(8), Budget(2, 10 * slab.row_bytes)) for _ in range(4)]
    assert found.count([6]) == 1
    assert found.count([]) == 3
    assert slab.verify(range(8), Budget(100, slab.row_bytes - 1)) == []
    assert Budget(100, 3 * slab.row_bytes).of(slab.row_bytes) == 3


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_check_reads_what_was_checked_longest_ago(data: st.DataObject) -> None:
    """Whatever else was checked before, in between and in what order: after as many offers as a prompt has blocks, each
    was read."""
    slab = filled(slots=24)
    path = data.draw(st.permutations(range(24)))[: data.draw(st.integers(1, 24))]
    budget = Budget(data.draw(st.integers(1, 6)), 10**9)
    parts = st.lists(st.sampled_from(range(24)), min_size=1, max_size=12, unique=True)
    for part in data.draw(st.lists(parts, max_size=6)):
        slab.verify(part)
    bad = data.draw(st.sampled_from(path))
    slab.rows[bad, 7] ^= 1
    other = [slot for slot in range(24) if slot != bad]
    for _ in path:
        oldest = min(path, key=lambda slot: slab._checked[slot])
        before = int(slab._clock)
        if slab.verify(path, budget) == [bad]:
            break
        assert slab._checked[oldest] == before + 1
        slab.verify(data.draw(st.permutations(other))[:5], budget)
    else:
        raise AssertionError(f"slot {bad} of {path} was never read")


def test_a_round_takes_no_more_checks_than_it_must() -> None:
    slab = filled(slots=10)
    for _ in range(3):
        started = slab._clock
        for _ in range(4):
            assert slab.verify(range(10), Budget(3, 10**9)) == []
        assert min(slab._checked) > started


def test_a_round_takes_no_more_checks_where_the_last_blocks_were_sealed_first() -> None:
    """The oldest is then the last one of the offer, with nothing behind it."""
    slab = HostSlab(64, ROW_BYTES)
    for slot in reversed(range(64)):
        slab.seal([slot])
    slab.rows[3, 0] += 1
    found = [slab.verify(range(64), Budget(16, 10**9)) for _ in range(4)]
    assert found == [[], [], [], [3]]


def test_slot_that_is_written_while_it_is_sealed_stays_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = filled()
    compute = slab._compute

    def interrupted(index: object) -> object:
        slab.break_seals([2])
        return compute(index)  # type: ignore[arg-type]

    monkeypatch.setattr(slab, "_compute", interrupted)
    slab.break_seals([1, 2])
    slab.seal([1, 2])
    monkeypatch.undo()
    assert slab.verify([1, 2]) == [2]


def test_slot_that_is_written_while_it_is_checked_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = filled()
    compute = slab._compute

    def interrupted(index: object) -> object:
        slab.break_seals([2])
        slab.rows[2, 0] ^= 1
        return compute(index)  # type: ignore[arg-type]

    monkeypatch.setattr(slab, "_compute", interrupted)
    assert slab.damaged([1, 2]) == []


def test_slots_for_says_the_numbers() -> None:
    assert slots_for(10 * 4096, 100, None) == 10
    assert slots_for(10 * 4096, 100, Available(10**9, "memory.max")) == 10
    with pytest.raises(
        Refused, match=r"connector.slab_bytes = 4000: one block of this model takes 4096 bytes.*at least 4096"
    ):
        slots_for(4000, 100, None)
    with pytest.raises(Refused, match=r"2 MiB are wanted and 1 MiB are available: memory.max.*at most 943718"):
        slots_for(2 * 1024 * 1024, 100, Available(1024 * 1024, "memory.max of /sys/fs/cgroup (2097152)"))


def test_scrub_goes_round_and_reports_damage_with_what_was_loaded_first() -> None:
    slab = filled(slots=6, size=2 * 1024 * 1024)  # two slots a step
    seen: list[tuple[list[int], bool]] = []
    now = [0.0]
    scrubber = Scrubber(slab, lambda slots, loaded: seen.append((list(slots), loaded)), lambda: now[0])
    slab.rows[1, 0] ^= 1
    slab.rows[4, 0] ^= 1
    scrubber.urgent([4], loaded=True)
    scrubber.step()
    assert seen == [([4], True)]
    for _ in range(3):
        scrubber.step()
    assert ([1], False) in seen
    assert scrubber.checked == 7
    slab.rows[3, 0] ^= 1
    assert scrubber.step() == 0  # a small slab is not read all the time
    now[0] += 10.0
    for _ in range(3):
        scrubber.step()
    assert ([3], False) in seen
    assert Scrubber(HostSlab(2, 10), lambda slots, loaded: None).step() == 0


def test_blocks_are_read_again_though_jobs_never_stop_coming() -> None:
    """A busy engine saves in every pass: what it loads has to be looked at all the same."""
    slab = HostSlab(2, 10)
    slab.seal([0])
    looked = threading.Event()

    class Scrubbing(Scrubber):
        def step(self) -> int:
            looked.set()
            return super().step()

    keeper = SlabScrubber("test", Scrubbing(slab, lambda slots, loaded: None))

    def job() -> None:
        if not looked.wait(0.001):
            keeper.submit(job)  # there is always one in the queue

    try:
        keeper.submit(job)
        keeper.submit(job)
        assert looked.wait(20.0)
    finally:
        looked.set()
        keeper.close()


def test_keeper_runs_jobs_in_order_and_survives_a_failing_one() -> None:
    keeper = SlabScrubber("test", Scrubber(HostSlab(2, 10), lambda slots, loaded: None))
    try:
        order: list[int] = []
        gate = threading.Event()

        def fail() -> None:
            raise RuntimeError("a job's fault")

        keeper.submit(lambda: (gate.wait(10), order.append(1))[1])
        keeper.submit(fail)
        keeper.submit(lambda: order.append(2))
        gate.set()
        assert keeper.drain(10)
        assert order == [1, 2]
        assert keeper.failed == 1
    finally:
        keeper.close()
