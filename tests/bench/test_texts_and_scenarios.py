"""The workload must be what it says: disjoint documents, related ones where a scenario needs them, always the same."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from dynamo_semkv.bench import scenarios
from dynamo_semkv.bench.texts import common_share, documents


def _text(request: scenarios.ChatRequest) -> str:
    return "\n".join(message["content"] for message in request.messages)


def test_documents_are_pairwise_disjoint_and_repeatable() -> None:
    docs = documents(26, 3_400)
    assert docs == documents(26, 3_400)
    assert all(len(doc.text) >= 3_400 for doc in docs)
    worst = max(common_share(a.text, b.text) for a, b in combinations(docs, 2))
    assert worst < 0.02


def test_more_documents_than_there_are_names_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"got 10000 documents of 3400 characters, this Python's reference holds \d+"):
        documents(10_000, 3_400)


def test_common_share_sees_a_copy_and_not_a_stranger() -> None:
    text = documents(2, 3_400)
    assert common_share(text[0].text, "Preface. " + text[0].text) > 0.95
    assert common_share("too short", text[0].text) == 0.0


def test_demo_scenarios_are_related_inside_and_disjoint_between() -> None:
    demo = {scenario.name: scenario for scenario in scenarios.demo()}
    other = demo["other_instruction"].requests
    assert common_share(_text(other[0]), _text(other[1])) > 0.9
    assert other[0].messages[0] != other[1].messages[0]
    chunks = demo["reordered_chunks"].requests
    assert common_share(_text(chunks[0]), _text(chunks[1])) > 0.9
    assert _text(chunks[0])[:200] != _text(chunks[1])[:200]
    everything_else = [_text(r) for name, s in demo.items() if name != "negative" for r in s.requests]
    for control in demo["negative"].requests:
        assert max(common_share(_text(control), text) for text in everything_else) < 0.02


def test_the_tenants_working_set_is_the_public_ones_with_a_salt() -> None:
    demo = {scenario.name: scenario for scenario in scenarios.demo()}
    public, salted = demo["working_set"].requests, demo["tenant_set"].requests
    assert len(public) == len(salted)
    assert {request.cache_salt for request in salted} == {"tenant-w"}
    assert not {_text(request) for request in salted} & {_text(request) for request in public}
    half = len(salted) // 2
    assert [r.messages[0] for r in salted[:half]] == [r.messages[0] for r in salted[half:]]


def test_agent_turns_extend_each_other_and_tenants_send_the_same() -> None:
    demo = {scenario.name: scenario for scenario in scenarios.demo()}
    turns = demo["agent"].requests
    for earlier, later in pairwise(turns):
        assert later.messages[: len(earlier.messages)] == earlier.messages
    tenants = demo["tenants"].requests
    half = len(tenants) // 2
    assert [r.messages for r in tenants[:half]] == [r.messages for r in tenants[half:]]
    assert {r.cache_salt for r in tenants} == {"tenant-a", "tenant-b"}
