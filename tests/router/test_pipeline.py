"""From what is known about one request to a decision: pure functions on hand-made overlap, load and matches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.config.load import build
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import prompt_key
from dynamo_semkv.contracts.location import SharedLocation, Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace, tenant_scope
from dynamo_semkv.router.facts import request_facts
from dynamo_semkv.router.pipeline import (
    Advice,
    DecisionContext,
    Lookup,
    Prompt,
    covers,
    host_evidence,
    narrow,
    reachable,
    weigh,
)
from dynamo_semkv.router.replicas import ReplicaDirectory
from dynamo_semkv.router.runtime_types import Exact, Overlap, RankLoad, RankOverlap
from dynamo_semkv.router.sheet_rows import queues, views
from dynamo_semkv.scoring.extra import GuardedScorer
from tests.router.fakes import A0, A1, B0, B1, BLOCK, NAMESPACE, a_request, announcement, card, match

CONFIG = build({"placement": {"mode": "enforce"}})
LIVE = {A0: card("w-a"), A1: card("w-a"), B0: card("w-b"), B1: card("w-b")}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_of_many_replicas_those_without_a_row_change_no_decision(data: st.DataObject) -> None:
    many = {ReplicaKey(100 + n, 0): card(f"w-{n}") for n in range(40)}
    made = ReplicaDirectory()
    made.update_live(many)
    for n in range(40):
        made.announce(announcement(f"w-{n}", 0))
    view, asked = made.view_of("m"), prompt(1024)
    load = data.draw(st.lists(st.sampled_from([0, 0, 0, 500, 900, 4_000, 60_000]), min_size=40, max_size=40))
    held = data.draw(st.dictionaries(st.sampled_from(sorted(many)), st.integers(0, 32), max_size=3))
    decode = data.draw(st.lists(st.sampled_from([32, 32, 5_000]), min_size=40, max_size=40))
    ranks = {key: RankOverlap(held.get(key, 0), 0, 0) for key in many}
    loads = {key: RankLoad(load[n], decode[n], 0) for n, key in enumerate(many)}
    found = Exact(Overlap(BLOCK, 32, ranks), loads)
    donors = data.draw(st.lists(st.integers(0, 39), max_size=4, unique=True))
    matches = [match((f"w-{n}", 0), 960, donor=f"{n:032x}") for n in donors]

    def decided(scorers: list[GuardedScorer]) -> Advice:
        return weigh(
            asked,
            found,
            Lookup("hit" if matches else "miss", True, matches),
            context=DecisionContext(made, CONFIG, scorers=scorers),
            view=view,
            mode=PlacementMode.ENFORCE,
            seed_material=bytes(8),
        )

    class Silent:
        name = "silent"

        def tokens(self, *_: object) -> float:
            return 0.0

    few, all_rows = decided([]), decided([GuardedScorer(Silent(), lambda error: None)])
    assert all_rows.sheet is not None
    assert len(all_rows.sheet.rows) == 40
    assert few.decision == all_rows.decision
    assert few.queued == all_rows.queued
    assert (few.exact_device_tokens, few.exact_host_tokens) == (all_rows.exact_device_tokens, 0)
    assert (few.sheet is None) is (not donors)
    if few.sheet is None:
        return
    assert len(few.sheet.rows) <= 8 + len({*held, *(ReplicaKey(100 + n, 0) for n in donors)})


def directory(announced: tuple[str, ...] = ("w-a", "w-b")) -> ReplicaDirectory:
    made = ReplicaDirectory()
    made.update_live(LIVE)
    for stable in announced:
        for rank in (0, 1):
            made.announce(announcement(stable, rank))
    return made


def prompt(tokens: int = 1024, **changes: Any) -> Prompt:
    return narrow(request_facts(a_request(tokens, **changes)), directory().view_of("m"), b"key")


def exact(
    tokens: int = 1024,
    *,
    ranks: dict[ReplicaKey, RankOverlap] | None = None,
    queued: dict[ReplicaKey, int] | None = None,
) -> Exact:
    ranks, queued = ranks or {}, queued or {}
    overlap = Overlap(BLOCK, tokens // BLOCK, {key: ranks.get(key, RankOverlap(0, 0, 0)) for key in LIVE})
    return Exact(overlap, {key: RankLoad(queued.get(key, 0), 0, 0) for key in LIVE})


def advice(found: Exact, *matches: SemanticTrtMatch, of: ReplicaDirectory | None = None, tokens: int = 1024) -> Advice:
    known = of or directory()
    return weigh(
        prompt(tokens),
        found,
        Lookup("hit" if matches else "miss", asked=True, matches=matches),
        context=DecisionContext(known, CONFIG),
        view=known.view_of("m"),
        mode=PlacementMode.ENFORCE,
        seed_material=b"seed",
    )


def test_narrow_puts_the_request_into_the_announced_namespace() -> None:
    got = prompt(100, routing={"cache_salt": "t"})
    assert got.namespace == NAMESPACE.for_request(tenant=tenant_scope("t", b"key"))
    assert got.digest == got.namespace.digest()
    assert got.key == prompt_key(got.digest, list(range(1, 101)))
    assert got.length == 100


def test_narrow_leaves_unknown_what_is_unknown() -> None:
    assert prompt(10, routing={"cache_salt": ""}).namespace.tenant is None
    assert prompt(10, routing={"lora_name": "a"}).namespace.lora_revision is None
    assert prompt(10, multi_modal_data={"image_url": [{}]}).namespace.multimodal is None
    unknown = narrow(request_facts(a_request(10)), ReplicaDirectory().view_of("m"), b"key")
    assert unknown.namespace == CacheNamespace().for_request(tenant="")


@pytest.mark.parametrize(("device", "expected"), [(28, False), (29, True), (32, True)])
def test_covers_at_the_share(device: int, expected: bool) -> None:
    assert covers(exact(ranks={B0: RankOverlap(device, 0, 0)}), prompt(), 0.9) is expected
    assert not covers(exact(0), prompt(0), 0.9)


def test_views_are_in_tokens_and_queues_are_dynamos() -> None:
    found = exact(ranks={A1: RankOverlap(4, 8, 2)}, queued={A1: 500, B0: 100})
    assert queues(LIVE, found) == {A0: 0, A1: 500, B0: 100, B1: 0}
    assert queues([A0], Exact(found.overlap, {})) == {A0: None}
    rows = {view.replica: view for view in views(directory(), found, prompt().length, 32_768)}
    assert set(rows) == set(LIVE)
    view = rows[A1]
    assert (view.device_tokens, view.host_tokens, view.disk_tokens) == (128, 256, 64)
    assert (view.queued_prefill_tokens, view.active_decode_blocks, view.total_blocks) == (500, 0, 4096)
    assert view.stable is not None
    assert not any(v.overloaded for v in rows.values())


def test_a_queue_far_behind_the_idlest_counts_as_overloaded() -> None:
    rows = {v.replica: v for v in views(directory(), exact(queued={A0: 5000, B0: 4000}), prompt().length, 4500)}
    assert {replica for replica, view in rows.items() if view.overloaded} == {A0}


def test_host_evidence_is_of_advisable_replicas_only() -> None:
    known = directory(("w-b",))
    found = exact(ranks={A0: RankOverlap(0, 10, 0), B0: RankOverlap(2, 10, 0), B1: RankOverlap(9, 0, 0)})
    (got,) = host_evidence(known, known.view_of("m"), found, prompt())
    assert got.location == WorkerLocation(worker_id=22, dp_rank=0, tier=Tier.HOST_PINNED)
    assert (got.reusable_token_count, got.match_type, got.provider_generation) == (
        384,
        MatchType.EXACT_EQUIVALENT,
        "g1",
    )


def test_an_unknown_namespace_field_leaves_no_host_evidence() -> None:
    known = directory()
    found = exact(ranks={A0: RankOverlap(0, 10, 0)})
    assert len(host_evidence(known, known.view_of("m"), found, prompt())) == 1
    assert host_evidence(known, known.view_of("m"), found, prompt(routing={"lora_name": "a"})) == []


def test_production_stack_1061_unknown_shared_and_unannounced_places_are_left_out() -> None:
    known = directory(("w-a",))
    shared = SemanticTrtMatch(
        donor_id="s",
        reusable_token_count=900,
        match_type=MatchType.SEMANTIC_CANDIDATE,
        location=SharedLocation(backend="s3", tier=Tier.EXTERNAL, locator="x"),
        provider="p",
        provider_generation="g",
    )
    matches = [match(("w-gone", 0), 900), match(("w-b", 0), 900), shared, match(("w-a", 1), 100)]
    assert [replica for _, replica in reachable(matches, known, known.view_of("m"))] == [A1]


def test_llm_d_kv_cache_357_a_donor_on_one_rank_gives_the_other_nothing() -> None:
    got = advice(exact(), match(("w-a", 1), 960))
    assert got.decision.placed == A1
    assert got.sheet is not None
    other = next(row for row in got.sheet.rows if row.replica == A0)
    assert other.match is None


def test_tokens_that_are_on_the_device_already_are_no_evidence() -> None:
    got = advice(exact(ranks={A1: RankOverlap(20, 0, 0)}), match(("w-a", 1), 640))
    assert got.decision.evidence_tokens == 0
    assert got.decision.placed is None
    got = advice(exact(ranks={A1: RankOverlap(10, 0, 0)}), match(("w-a", 1), 960))
    assert got.decision.evidence_tokens == 640
    assert got.exact_device_tokens == 320


def test_a_similar_donor_is_worth_a_tenth_and_is_placed_only_when_that_is_enough() -> None:
    similar = match(("w-a", 1), 1000, kind=MatchType.SEMANTIC_CANDIDATE)
    got = advice(exact(), similar)
    assert got.decision.placed is None
    assert got.decision.evidence_tokens == 1000
    long = match(("w-a", 1), 15_000, kind=MatchType.SEMANTIC_CANDIDATE)
    got = advice(exact(16_384), long, tokens=16_384)
    assert got.decision.placed == A1


def test_load_outweighs_a_donor() -> None:
    got = advice(exact(queued={A1: 5000}), match(("w-a", 1), 960))
    assert got.decision.placed is None
    assert got.decision.evidence_tokens == 960


def test_negative_control_nothing_found_places_nothing() -> None:
    got = advice(exact(queued={A0: 4000, B1: 100}))
    assert (got.decision.placed, got.decision.reason.value, got.decision.evidence_tokens) == (None, "no_evidence", 0)


REPLICAS = st.sampled_from([("w-a", 0), ("w-a", 1), ("w-b", 0), ("w-b", 1), ("w-gone", 0)])
MATCHES = st.lists(
    st.builds(
        lambda where, tokens, donor, kind: match(where, tokens, donor=f"donor-{donor}", kind=kind),
        REPLICAS,
        st.integers(1, 1024),
        st.integers(0, 20),
        st.sampled_from(list(MatchType)),
    ),
    max_size=6,
    unique_by=lambda m: m.donor_id,
)
RANKS = st.dictionaries(
    st.sampled_from(list(LIVE)), st.builds(RankOverlap, st.integers(0, 16), st.integers(0, 16), st.integers(0, 4))
)


@settings(deadline=None, max_examples=50)
@given(MATCHES, RANKS, st.dictionaries(st.sampled_from(list(LIVE)), st.integers(0, 60_000)), st.randoms())
def test_production_stack_1055_decision_is_independent_of_the_order_of_matches_and_replicas(
    matches: list[SemanticTrtMatch], ranks: dict[ReplicaKey, RankOverlap], queued: dict[ReplicaKey, int], random: Any
) -> None:
    found = exact(ranks=ranks, queued=queued)
    one = advice(found, *matches)
    shuffled = list(matches)
    random.shuffle(shuffled)
    known = ReplicaDirectory()
    order = list(LIVE)
    random.shuffle(order)
    known.update_live({key: LIVE[key] for key in order})
    for stable in ("w-b", "w-a"):
        for rank in (1, 0):
            known.announce(announcement(stable, rank))
    two = advice(found, *shuffled, of=known)
    assert (one.decision.reason, one.decision.placed, one.decision.evidence_tokens) == (
        two.decision.reason,
        two.decision.placed,
        two.decision.evidence_tokens,
    )
    decision = one.decision
    assert 0 <= decision.hinted_tokens <= decision.placed_tokens <= decision.evidence_tokens <= 1024
    assert 0 <= one.exact_device_tokens + one.exact_host_tokens <= 1024
    if decision.placed is not None:
        assert decision.placed in LIVE
        assert decision.placed_tokens > 0
