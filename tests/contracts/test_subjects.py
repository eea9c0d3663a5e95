"""Subjects name who speaks, and no id can add a token or a wildcard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import StableReplica

stable_ids = st.text("ABCxyz019._:-", min_size=1, max_size=128)
replicas = st.builds(StableReplica, stable_ids, st.integers(0, 65_535))
MAKERS = (subjects.donor_events, subjects.reports, subjects.announcements, subjects.hints)


@given(replicas, st.sampled_from(MAKERS))
def test_speaker_is_who_the_subject_was_made_for(replica, make) -> None:
    subject = make(replica)
    assert subjects.speaker(subject) == replica
    assert subject.count(".") == make(StableReplica("w", 0)).count(".")
    assert not {"*", ">", " "} & set(subject)


@given(replicas, replicas, st.sampled_from(MAKERS))
def test_two_replicas_never_share_a_subject(one, two, make) -> None:
    assert (make(one) == make(two)) == (one == two)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "semantic-kv-events",
        "semkv.reports",
        "semkv.reports.w",
        "semkv.reports.w.x",
        "semkv.reports.w.-1",
        "semkv.reports.w.١",
        "semkv.reports.w.1.2",
        "semkv.reports.a_.1",
        "semkv.reports.a_x.1",
        "semkv.reports..1",
        "semkv.reports.a b.1",
        "semkv.reports." + "a" * 129 + ".1",
        "semkv.reports.w.111111",
        "semkv.routes.router-1.0",
        "other.w.1",
    ],
)
def test_malformed_subject_has_no_speaker(subject: str) -> None:
    assert subjects.speaker(subject) is None
