"""Who goes when the store is full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.evidence.chains import Slots
from dynamo_semkv.evidence.retention import SECOND_CHANCES, Retention


class Named:
    """A Retention whose members have names, as the tests want them."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.retention = Retention(self.slots)
        self.slot: dict[str, int] = {}

    def add(self, group: str, name: str, worker: int = 0) -> None:
        if name not in self.slot:
            self.slot[name] = self.slots.take()
        self.retention.add(group, worker, self.slot[name])

    def discard(self, group: str, name: str, worker: int = 0) -> None:
        """As the catalog does it: who leaves gives its slot back."""
        if name in self.slot:
            self.retention.discard(group, worker, self.slot[name])
            self.slots.give_back(self.slot.pop(name))

    def touch(self, name: str) -> None:
        if name in self.slot:
            self.retention.touch(self.slot[name])

    def victim(self, group: str | None = None) -> str | None:
        slot = self.retention.victim(group)
        return None if slot is None else {number: name for name, number in self.slot.items()}[slot]

    def __len__(self) -> int:
        return len(self.retention)


def filled(**groups: str) -> Named:
    """`filled(a="xyz")`: group a with members x, y, z, oldest first."""
    named = Named()
    for group, members in groups.items():
        for member in members:
            named.add(group, member)
    return named


def test_the_oldest_of_the_largest_group_goes_first() -> None:
    assert filled(a="x", b="pqr").victim() == "p"
    assert filled(a="x", b="pqr").victim("a") == "x"


def test_nobody_goes_from_nothing() -> None:
    assert Named().victim() is None
    assert filled(a="x").victim("b") is None


def test_the_largest_group_follows_arrivals_and_departures() -> None:
    retention = filled(a="xyz", b="pq")
    retention.discard("a", "x")
    retention.discard("a", "y")
    assert retention.victim() == "p"
    retention.discard("b", "p")
    retention.discard("b", "q")
    assert retention.victim() == "z"
    assert (len(retention), retention.retention.namespaces) == (1, 1)


def test_use_buys_one_turn() -> None:
    retention = filled(a="xyz")
    retention.touch("x")
    assert retention.victim() == "y"
    retention.discard("a", "y")
    assert retention.victim() == "z"
    retention.discard("a", "z")
    assert retention.victim() == "x"


def test_when_all_were_used_somebody_goes_all_the_same() -> None:
    members = [f"m{n}" for n in range(3 * SECOND_CHANCES)]
    retention = Named()
    for member in members:
        retention.add("a", member)
        retention.touch(member)
    assert retention.victim() in members


def test_adding_again_keeps_the_age_and_discarding_twice_is_nothing() -> None:
    retention = filled(a="xy")
    retention.add("a", "x")
    assert retention.victim() == "x"
    retention.discard("a", "y")
    retention.discard("a", "y")
    assert len(retention) == 1


def test_a_slot_that_comes_back_has_no_use_to_its_name() -> None:
    retention = filled(a="xy")
    retention.touch("x")
    retention.discard("a", "x")
    retention.add("a", "z")
    retention.discard("a", "y")
    retention.add("a", "w")
    assert retention.victim() == "z"


def test_a_worker_that_invents_namespaces_gives_up_its_own() -> None:
    retention = Named()
    for member in "xyz":
        retention.add("common", member, worker=1)
    for number in range(4):
        retention.add(f"invented{number}", f"i{number}", worker=2)
    assert retention.victim() == "i0"
    assert retention.victim("common") == "x"


def test_in_one_namespace_the_worker_with_most_of_it_gives_up_its_own() -> None:
    retention = Named()
    retention.add("a", "old", worker=1)
    for member in "xyz":
        retention.add("a", member, worker=2)
    assert retention.victim() == retention.victim("a") == "x"
    for member in "xyz":
        retention.discard("a", member, worker=2)
    assert retention.victim("a") == "old"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 5), st.booleans())))
def test_victims_are_of_a_worker_with_most(steps: list[tuple[int, str, int, bool]]) -> None:
    retention = Named()
    has: dict[tuple[int, str], set[str]] = {}
    for worker, group, number, adds in steps:
        member = f"{worker}{group}{number}"
        members = has.setdefault((worker, group), set())
        if adds:
            retention.add(group, member, worker)
            members.add(member)
        else:
            retention.discard(group, member, worker)
            members.discard(member)
        total = {w: sum(len(m) for (owner, _), m in has.items() if owner == w) for w in range(3)}
        victim = retention.victim()
        if not any(total.values()):
            assert victim is None
            continue
        assert victim is not None
        of, in_group = int(victim[0]), victim[1]
        assert total[of] == max(total.values())
        assert len(has[of, in_group]) == max(len(m) for (owner, _), m in has.items() if owner == of)
        here = retention.victim(in_group)
        assert here is not None
        assert len(has[int(here[0]), in_group]) == max(len(m) for (_, g), m in has.items() if g == in_group)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from(["add", "discard", "touch"]))))
def test_victims_are_members_of_a_largest_group(steps: list[tuple[str, int, str]]) -> None:
    retention = Named()
    groups: dict[str, set[str]] = {"a": set(), "b": set(), "c": set()}
    for group, number, what in steps:
        member = f"{group}{number}"
        if what == "add":
            retention.add(group, member)
            groups[group].add(member)
        elif what == "discard":
            retention.discard(group, member)
            groups[group].discard(member)
        else:
            retention.touch(member)
        victim = retention.victim()
        largest = max(map(len, groups.values()))
        if largest == 0:
            assert victim is None
        else:
            assert victim is not None
            assert victim in groups[victim[0]]
            assert len(groups[victim[0]]) == largest
        assert len(retention) == sum(map(len, groups.values()))
        assert all(retention.retention.size(g) == len(members) for g, members in groups.items())
