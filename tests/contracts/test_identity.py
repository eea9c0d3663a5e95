"""Ids, subjects and the small closed sets."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import Bucket, SemanticTrtSegment
from dynamo_semkv.contracts.identity import (
    U64_MAX,
    StableReplica,
    check_donor_id,
    check_route_id,
    check_stable_routing_id,
    check_u64,
    new_donor_id,
    new_generation,
    new_route_id,
    stable_worker_id,
)
from tests.contracts import strategies

REPLICA_SUBJECTS = (subjects.donor_events, subjects.reports, subjects.announcements, subjects.hints)
replicas = st.builds(StableReplica, strategies.stable_ids, strategies.ranks)
tricky_ids = st.text("_.:dc-A", min_size=1, max_size=8)


@given(st.builds(StableReplica, tricky_ids, st.integers(0, 3)), st.builds(StableReplica, tricky_ids, st.integers(0, 3)))
def test_two_replicas_never_share_a_subject(left: StableReplica, right: StableReplica) -> None:
    for subject in REPLICA_SUBJECTS:
        assert (subject(left) == subject(right)) == (left == right)
    routers = left.stable_routing_id, right.stable_routing_id
    assert (subjects.routes(routers[0]) == subjects.routes(routers[1])) == (routers[0] == routers[1])


@given(replicas)
def test_an_id_adds_no_token_and_no_wildcard(replica: StableReplica) -> None:
    for subject in REPLICA_SUBJECTS:
        name = subject(replica)
        prefix = subject(StableReplica("x", 0)).removesuffix(".x.0")
        assert re.fullmatch(re.escape(prefix) + r"\.[A-Za-z0-9_-]+\.\d+", name)
    assert subjects.routes(replica.stable_routing_id).count(".") == 2


@pytest.mark.parametrize("bad", ["", "a b", "a*", ">", "a\r\nPUB x 0", "ä", "x" * 129, "a/b"])
def test_ids_that_could_be_something_else_on_the_bus_are_refused(bad: str) -> None:
    with pytest.raises(ContractError, match="stable_routing_id"):
        check_stable_routing_id(bad)
    with pytest.raises(ContractError):
        subjects.hints(StableReplica(bad, 0))
    with pytest.raises(ContractError):
        stable_worker_id(bad)


@given(strategies.stable_ids, strategies.stable_ids)
def test_stable_worker_ids(left: str, right: str) -> None:
    ids = stable_worker_id(left), stable_worker_id(right)
    assert (ids[0] == ids[1]) == (left == right)
    assert all(check_u64("worker_id", number) == number for number in ids)


def test_new_ids_are_valid_and_new() -> None:
    routes = {check_route_id(new_route_id()) for _ in range(100)}
    donors = {check_donor_id(new_donor_id()) for _ in range(100)}
    assert len(routes) == len(donors) == len({new_generation() for _ in range(100)}) == 100


@pytest.mark.parametrize("bad", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n"])
def test_bad_route_ids(bad: str) -> None:
    with pytest.raises(ContractError, match="route_id"):
        check_route_id(bad)


@pytest.mark.parametrize("bad", ["", " ", "a b", "a\n", "é", "x" * 129])
def test_bad_donor_ids(bad: str) -> None:
    with pytest.raises(ContractError, match="donor_id"):
        check_donor_id(bad)


@pytest.mark.parametrize("bad", [-1, U64_MAX + 1])
def test_bad_u64(bad: int) -> None:
    with pytest.raises(ContractError, match="f: got"):
        check_u64("f", bad)


@pytest.mark.parametrize(
    ("share", "bucket"),
    [
        (float("nan"), Bucket.NONE),
        (-1.0, Bucket.NONE),
        (0.0, Bucket.NONE),
        (1e-9, Bucket.LOW),
        (0.25, Bucket.MEDIUM),
        (0.5, Bucket.HIGH),
        (0.9, Bucket.FULL),
        (1.0, Bucket.FULL),
    ],
)
def test_buckets(share: float, bucket: Bucket) -> None:
    assert Bucket.of(share) is bucket


@pytest.mark.parametrize(("target", "donor", "count"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_segments_are_somewhere_and_not_empty(target: int, donor: int, count: int) -> None:
    with pytest.raises(ContractError, match="segment"):
        SemanticTrtSegment(target_start=target, donor_start=donor, token_count=count)


def test_an_error_carries_field_value_and_what_is_allowed() -> None:
    error = ContractError("f", "v" * 500, "short ones")
    assert (error.field, error.allowed) == ("f", "short ones")
    assert len(str(error)) < 200
    assert "secret" not in str(ContractError("f", "secret", "x", secret=True))
