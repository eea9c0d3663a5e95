"""The snapshot is JSON, says what the totals say, and holds nothing that must not leave the process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.observe.snapshot import MAX_REPLICA_ROWS, MAX_SAFE_INTEGER, build_snapshot, explain, to_plain
from dynamo_semkv.observe.state import ReplicaStatus, StreamStatus
from dynamo_semkv.outcome.closed import JoinedBy, close_route
from dynamo_semkv.outcome.history import History
from tests.observe.fake_state import empty_state, fake_history, fake_state
from tests.outcome.build import observed, opened, report


def strict(value: object) -> str:
    return json.dumps(value, allow_nan=False)


@pytest.mark.parametrize("state", [fake_state(), empty_state()], ids=["busy", "empty"])
def test_it_is_strict_json(state) -> None:
    assert json.loads(strict(build_snapshot(state))) == build_snapshot(state)


def test_it_says_what_the_totals_say() -> None:
    state = fake_state()
    snapshot = build_snapshot(state)
    tokens = {row["step"]: row["tokens"] for row in snapshot["funnel"]}
    assert tokens == state.totals.funnel.tokens
    assert list(tokens) == ["input", "evidence", "placed", "hinted", "materialized", "beyond_dynamo"]
    assert list(tokens.values()) == sorted(tokens.values(), reverse=True)
    assert snapshot["funnel"][-2]["share"] == pytest.approx(tokens["materialized"] / tokens["input"])
    assert sum(row["routes"] for row in snapshot["outcomes"]) == snapshot["requests"] == 600
    assert snapshot["beside"]["confirmed_tokens"] == tokens["materialized"] + snapshot["beside"]["unhinted_tokens"]
    assert sum(snapshot["course"]["requests"]) == 600
    assert sum(snapshot["course"]["materialized"]) == tokens["materialized"]
    assert {row["class"] for row in snapshot["ttft"]} == {"cold", "warm", "loaded"}
    assert snapshot["orphans"] == [{"reason": "late", "reports": 1}, {"reason": "wrong_replica", "reports": 1}]


def test_no_division_by_nothing() -> None:
    snapshot = build_snapshot(empty_state())
    assert [row["share"] for row in snapshot["funnel"]] == [None] * 6
    assert [row["median_seconds"] for row in snapshot["ttft"]] == [None] * 3
    assert snapshot["since"] is None


def test_ids_are_strings() -> None:
    snapshot = build_snapshot(fake_state())
    (row, *_) = snapshot["replicas"]
    assert row["worker_id"] == "7587890123456789001"
    assert int(row["worker_id"]) > MAX_SAFE_INTEGER


def test_replicas_that_are_gone_stay_in_the_record() -> None:
    state = fake_state()
    state = replace(state, replicas=state.replicas[:1])
    rows = build_snapshot(state)["replicas"]
    assert [(row["name"], row["live"]) for row in rows] == [
        ("worker-a/0", True),
        ("worker-a/1", False),
        ("worker-b/0", False),
        ("worker-b/1", False),
    ]
    assert all(row["confirmed_tokens"] > 0 for row in rows)


def test_thousands_of_replicas_do_not_make_a_huge_page() -> None:
    state = empty_state(replicas=[ReplicaStatus(worker_id=n, dp_rank=0) for n in range(2_000)])
    assert len(build_snapshot(state)["replicas"]) == MAX_REPLICA_ROWS


class TestExplain:
    def route(self):
        history = History(10)
        start = opened(prompt_key=b"\xab" * 16, traceparent="00-a-b-01", donor_id="donor-7")
        history.add(close_route(start, observed(), report(prompt_key=b"\xab" * 16), JoinedBy.ROUTE_ID, 9.0))
        return history.recent(1)[0]

    def test_holds_everything_but_the_key_over_the_prompt(self) -> None:
        explained = explain(self.route())
        text = strict(explained)
        assert explained["opened"]["donor_id"] == "donor-7"
        assert explained["report"]["confirmed"] == 800
        assert explained["joined_by"] == "route_id"
        assert "prompt_key" not in text
        assert "q6ur" not in text  # base64 of the key
        assert "abab" not in text

    def test_parts_that_never_came(self) -> None:
        explained = explain(close_route(opened(), None, None, JoinedBy.NONE, 9.0))
        assert explained["report"] is explained["observed"] is None
        assert explained["outcome"] == "unconfirmed"


def test_recent_routes_are_in_the_order_of_their_opening() -> None:
    times = [row["opened_at"] for row in build_snapshot(fake_state())["recent"]]
    assert len(times) == 50
    assert times == sorted(times, reverse=True)


def test_recent_routes_hold_no_key_over_a_prompt() -> None:
    snapshot = build_snapshot(fake_state(fake_history(5)))
    assert len(snapshot["recent"]) == 5
    assert "prompt_key" not in strict(snapshot)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=400) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@given(anything)
def test_whatever_a_provider_says_becomes_strict_json(value: object) -> None:
    plain = to_plain(value)
    assert json.loads(strict(plain)) == plain


def test_deep_and_odd_values() -> None:
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    assert len(strict(to_plain(deep))) < 100
    assert to_plain(2**63) == str(2**63)
    assert to_plain(float("nan")) is None
    assert to_plain(object()) == "object"


def test_rows_of_the_bus_are_counts_also_with_a_stranger_among_them() -> None:
    stranger = StreamStatus("reports", True, 10, 0, 7, 0, (3.0, "2.0"))
    (row,) = build_snapshot(fake_state(fake_history(1), streams=[stranger]))["streams"]
    assert row == {
        "name": "reports", "caught_up": True, "messages": 10, "malformed": 0, "unsupported_version": 7,
        "foreign_subject": 0,
    }  # fmt: skip
