"""The default provider: who is found, who is not, and what a match claims."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dynamo_semkv.config.evidence import FingerprintConfig
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace, tenant_scope
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.donor import Epoch
from dynamo_semkv.evidence.fingerprint import MAX_CANDIDATES, MAX_SEGMENTS, FingerprintProvider
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.documents import BLOCK, document, edited, joined, namespace, query_of
from tests.evidence.donors import donor

NS = namespace()


def provider_with(*texts: TokenArray, where: CacheNamespace = NS, **config: object) -> FingerprintProvider:
    """Donors `0`, `1`, ... of the given texts."""
    provider = FingerprintProvider(FingerprintConfig(**config))  # type: ignore[arg-type]
    for n, tokens in enumerate(texts):
        provider.donor_added(donor(str(n), tokens, where))
    return provider


def found_by(provider: FingerprintProvider, tokens: TokenArray, where: CacheNamespace = NS) -> list[str]:
    return [match.donor_id for match in provider.lookup(query_of(tokens, where))]


BACKGROUND = [document(900 + n, 2_000) for n in range(30)]


def test_the_same_prompt_is_exact_equivalent() -> None:
    text = document(1, 4_000)
    match = provider_with(*BACKGROUND, text).lookup(query_of(text, NS))[0]
    assert match.donor_id == "30"
    assert match.match_type is MatchType.EXACT_EQUIVALENT
    assert match.exact_prefix_tokens == 4_000 // BLOCK * BLOCK
    assert match.reusable_token_count >= match.exact_prefix_tokens
    assert (match.provider, match.provider_generation, match.edited) == ("fingerprint", "g1", False)
    assert match.location == WorkerLocation(1, 0, Tier.HOST_PINNED)
    assert match.overlap > 0.98
    assert match.confidence > 0.95
    assert [(s.target_start, s.donor_start) for s in match.segments] == [(0, 0)]
    assert match.metadata == {"donor_tokens": 4_000, "sample_spacing": 16}
    assert match.quality_signals["verified_tokens"] == match.exact_prefix_tokens
    assert match.quality_signals["longest_run"] > 3_800
    assert match.quality_signals["shared_samples"] > 200
    assert match.quality_signals["evidence"] > 0.0


def test_the_next_turn_of_a_conversation_finds_the_last_one() -> None:
    turns = [document(10 + n, 600) for n in range(6)]
    provider = provider_with(*BACKGROUND, *[joined(*turns[: n + 1]) for n in range(5)])
    match = provider.lookup(query_of(joined(*turns), NS))[0]
    assert match.donor_id == "34"
    assert match.match_type is MatchType.EXACT_EQUIVALENT
    assert match.exact_prefix_tokens == 3_000 // BLOCK * BLOCK
    assert abs(match.reusable_token_count - 3_000) < 64


def test_the_same_document_behind_another_instruction_is_semantic() -> None:
    """No block of it has the same key: exact engines cannot load it, and the match must not pretend they can."""
    body = document(2, 4_000)
    provider = provider_with(*BACKGROUND, joined(document(3, 100), body))
    match = provider.lookup(query_of(joined(document(4, 140), body, document(5, 60)), NS))[0]
    assert match.donor_id == "30"
    assert match.match_type is MatchType.SEMANTIC_CANDIDATE
    assert match.exact_prefix_tokens == 0
    assert abs(match.reusable_token_count - 4_000) < 100
    assert all(s.target_start - s.donor_start == 40 for s in match.segments if s.token_count > 50)


def test_a_small_proven_prefix_does_not_make_a_match_exact() -> None:
    """One system block in common and six thousand tokens elsewhere: what an exact engine could load is not what is
    claimed."""
    system, body = document(6, 64), document(7, 4_000)
    provider = provider_with(*BACKGROUND, joined(system, document(8, 100), body))
    match = provider.lookup(query_of(joined(system, document(9, 33), body), NS))[0]
    assert match.exact_prefix_tokens == 64
    assert match.match_type is MatchType.SEMANTIC_CANDIDATE


def test_a_half_common_prefix_is_exact_and_proven_for_most_of_it() -> None:
    text = document(11, 6_000)
    provider = provider_with(*BACKGROUND, text)
    match = provider.lookup(query_of(joined(text[:3_000], document(12, 3_000)), NS))[0]
    assert match.match_type is MatchType.EXACT_EQUIVALENT
    assert 2_000 - BLOCK <= match.exact_prefix_tokens <= 3_000
    assert match.exact_prefix_tokens % BLOCK == 0
    assert abs(match.reusable_token_count - 3_000) < 64


def test_an_unknown_field_of_the_namespace_leaves_no_proof() -> None:
    where = namespace(lora=None)  # type: ignore[arg-type]
    text = document(13, 3_000)
    match = provider_with(*BACKGROUND, text, where=where).lookup(query_of(text, where))[0]
    assert (match.exact_prefix_tokens, match.match_type) == (0, MatchType.SEMANTIC_CANDIDATE)


def test_an_emitter_cannot_stretch_a_proof_by_lying_about_its_block_size() -> None:
    text = document(13, 3_000)
    provider = provider_with(*BACKGROUND)
    provider.donor_added(replace(donor("liar", text, NS), tokens_per_block=10 * BLOCK))
    match = provider.lookup(query_of(joined(text[:320], document(12, 3_000)), NS))[0]
    assert (match.donor_id, match.exact_prefix_tokens <= 320) == ("liar", True)


def test_an_edited_document_is_flagged_and_its_segments_leave_the_edits_out() -> None:
    text = document(14, 6_000)
    prompt = edited(text, 60)
    match = provider_with(*BACKGROUND, text).lookup(query_of(prompt, NS))[0]
    assert match.donor_id == "30"
    assert match.edited
    assert match.match_type is MatchType.SEMANTIC_CANDIDATE
    assert len(match.segments) <= MAX_SEGMENTS
    for segment in match.segments:
        ours = prompt[segment.target_start : segment.target_start + segment.token_count]
        theirs = text[segment.donor_start : segment.donor_start + segment.token_count]
        assert ours.tolist() == theirs.tolist()
    truth = int((text == prompt).sum())
    assert abs(match.reusable_token_count - truth) < 0.1 * truth


def test_the_right_one_among_variants_comes_first() -> None:
    text = document(15, 3_000)
    variants = [edited(text, 40, seed) for seed in range(6)]
    provider = provider_with(*BACKGROUND, *variants)
    for n, variant in enumerate(variants):
        assert found_by(provider, joined(variant, document(16, 60)))[0] == str(30 + n)


@pytest.mark.parametrize("seed", range(8))
def test_negative_control_an_unrelated_prompt_finds_nobody(seed: int) -> None:
    rng = np.random.default_rng(seed)
    provider = provider_with(*[rng.integers(0, 50_000, 2_000).astype(np.uint32) for _ in range(50)])
    assert found_by(provider, rng.integers(0, 50_000, 4_000).astype(np.uint32)) == []


@pytest.mark.parametrize("template_tokens", [300, 1_400])
def test_negative_control_a_template_of_everybody_finds_nobody(template_tokens: int) -> None:
    template = document(20, template_tokens)
    provider = provider_with(*[joined(template, document(100 + n, 3_000)) for n in range(40)])
    assert found_by(provider, joined(template, document(21, 4_000))) == []


def test_a_template_does_not_hide_the_right_document() -> None:
    template = document(20, 1_400)
    bodies = [document(200 + n, 2_000) for n in range(60)]
    provider = provider_with(*[joined(template, body) for body in bodies])
    for n in (0, 17, 59):
        matches = provider.lookup(query_of(joined(template, document(22, 100), bodies[n]), NS))
        assert [match.donor_id for match in matches] == [str(n)]
        assert abs(matches[0].reusable_token_count - 3_400) < 200, "template tokens are verbatim tokens too"


def test_a_template_of_many_is_a_match_where_it_is_a_proven_prefix_worth_the_name() -> None:
    """A third of the donors begin with it: a proven prefix needs no rarity. One of 300 tokens is not worth naming in a
    long prompt."""
    template = document(20, 1_400)
    templated = [joined(template, document(100 + n, 3_000)) for n in range(12)]
    provider = provider_with(*BACKGROUND, *templated)
    match = provider.lookup(query_of(joined(template, document(21, 14_000)), NS))[0]
    assert int(match.donor_id) >= 30
    assert 900 < match.exact_prefix_tokens <= match.reusable_token_count <= 1_500
    assert found_by(provider, joined(template, document(21, 40_000)))
    assert found_by(provider, joined(template[:300], document(21, 14_000))) == []


def test_chunks_of_two_hundred_tokens_are_measured_to_a_tenth() -> None:
    chunks = [document(700 + n, 200) for n in range(10)]
    provider = provider_with(*BACKGROUND, joined(*chunks))
    for orders in range(5):
        shuffled = [chunks[n] for n in np.random.default_rng(orders).permutation(10)]
        (match,) = provider.lookup(query_of(joined(document(40, 30), *shuffled), NS))
        assert abs(match.reusable_token_count - 2_000) <= 200


def test_short_and_long_donors_are_found_by_one_prompt() -> None:
    """Their samples are 8, 16 and 32 tokens apart; each is compared at its own spacing."""
    short, middle, long = (document(710 + n, tokens) for n, tokens in enumerate((1_500, 4_000, 12_000)))
    provider = provider_with(*BACKGROUND, short, middle, long)
    prompt = joined(document(41, 500), long[:6_000], short, middle)
    found = {match.donor_id: match.reusable_token_count for match in provider.lookup(query_of(prompt, NS))}
    assert {donor_id: round(tokens / 100) for donor_id, tokens in found.items()} == {"30": 15, "31": 40, "32": 60}


def test_a_common_phrase_is_no_match() -> None:
    """Ten shared words in four thousand."""
    phrase = document(23, 40)
    provider = provider_with(*[joined(document(300 + n, 1_000), phrase, document(400 + n, 1_000)) for n in range(3)])
    assert found_by(provider, joined(document(24, 2_000), phrase, document(25, 2_000))) == []


def test_five_hundred_donors_of_one_document_still_name_somebody() -> None:
    body = document(26, 1_500)
    texts = [joined(document(1_000 + n, 40), body, document(2_000 + n, 40)) for n in range(60)]
    provider = provider_with(*BACKGROUND, *[document(3_000 + n, 400) for n in range(200)], *texts)
    matches = provider.lookup(query_of(joined(document(27, 50), body), NS))
    assert 0 < len(matches) <= MAX_CANDIDATES
    assert all(abs(match.reusable_token_count - 1_500) < 150 for match in matches)


def test_removed_donors_are_not_found_and_their_partition_goes() -> None:
    provider = provider_with(*BACKGROUND)
    provider.donor_removed("3")
    provider.donor_removed("3")
    assert found_by(provider, BACKGROUND[3]) == []
    assert found_by(provider, BACKGROUND[4]) == ["4"]
    for n in range(30):
        provider.donor_removed(str(n))
    assert (len(provider), provider.snapshot()["partitions"]) == (0, 0)


def test_registering_again_replaces() -> None:
    provider = provider_with(*BACKGROUND)
    provider.donor_added(donor("3", document(30, 2_000), NS))
    assert found_by(provider, BACKGROUND[3]) == []
    assert found_by(provider, document(30, 2_000)) == ["3"]
    assert len(provider) == 30


def test_a_donor_that_moved_is_reported_where_it_is_now() -> None:
    provider = provider_with(*BACKGROUND)
    moved = replace(donor("3", BACKGROUND[3], NS), location=WorkerLocation(8, 1, Tier.DISK))
    provider.donor_added(moved)
    assert provider.lookup(query_of(BACKGROUND[3], NS))[0].location == WorkerLocation(8, 1, Tier.DISK)


def test_a_donor_may_change_its_namespace() -> None:
    other = namespace("other")
    provider = provider_with(*BACKGROUND)
    provider.donor_added(donor("3", BACKGROUND[3], other))
    assert found_by(provider, BACKGROUND[3]) == []
    assert found_by(provider, BACKGROUND[3], other) == ["3"]


def test_a_donor_without_samples_is_no_evidence_and_replaces_one_that_had_some() -> None:
    provider = provider_with(*BACKGROUND)
    provider.donor_added(replace(donor("3", BACKGROUND[3], NS), sketch=None))
    provider.donor_added(donor("short", document(31, 7), NS))
    assert found_by(provider, BACKGROUND[3]) == []
    assert len(provider) == 29
    assert provider.counts["without_sketch"] == 2


def test_donors_of_a_life_without_credit_are_not_evidence() -> None:
    epoch = Epoch("g1")
    provider = provider_with(*BACKGROUND)
    provider.donor_added(donor("x", document(32, 2_000), NS, epoch=epoch))
    assert found_by(provider, document(32, 2_000)) == ["x"]
    epoch.creditable = False
    assert found_by(provider, document(32, 2_000)) == []
    epoch.creditable = True
    assert found_by(provider, document(32, 2_000)) == ["x"]


def test_a_donor_that_is_found_is_evicted_later() -> None:
    """Eviction by value: the catalog learns from the provider which donors are good for something."""
    provider = FingerprintProvider()
    catalog = DonorCatalog([provider], clock=ManualClock(), limits=CatalogLimits(max_donors=3))
    tape = EventTape()
    tape.reset()
    for n in range(3):
        tape.register(str(n), BACKGROUND[n], NS)
    for event in tape:
        catalog.apply(event)
    assert found_by(provider, BACKGROUND[0]) == ["0"]
    catalog.apply(tape.register("3", BACKGROUND[3], NS))
    assert found_by(provider, BACKGROUND[0]) == ["0"]
    assert found_by(provider, BACKGROUND[1]) == []


def test_from_the_bus_to_a_match() -> None:
    """Catalog and provider together: registration, partial eviction, a gap, and a reset."""
    text = document(33, 4_000)
    provider = FingerprintProvider()
    catalog = DonorCatalog([provider], clock=ManualClock())
    tape = EventTape(worker_id=5)
    tape.reset()
    tape.register("a", text, NS, cuts=(2_000,))
    for event in tape:
        catalog.apply(event)
    whole = provider.lookup(query_of(text, NS))[0]
    assert whole.exact_prefix_tokens == 4_000
    catalog.apply(tape.evict("a", [0]))
    rest = provider.lookup(query_of(text, NS))[0]
    assert rest.exact_prefix_tokens == 0
    assert all(s.donor_start >= 2_000 for s in rest.segments)
    assert abs(rest.reusable_token_count - 2_000) < 100
    tape.skip()
    catalog.apply(tape.register("b", text, NS))
    assert found_by(provider, text) == []
    catalog.apply(tape.reset("g2"))
    catalog.apply(tape.register("c", text, NS))
    assert found_by(provider, text) == ["c"]


def test_an_empty_or_tiny_prompt_is_a_miss() -> None:
    provider = provider_with(*BACKGROUND)
    for tokens in (0, 5, 8, 30):
        assert found_by(provider, document(40, tokens)) == []


def test_vllm_semantic_router_2134_two_tenants_with_the_same_text_never_meet() -> None:
    text = document(41, 4_000)
    alice, bob = namespace(tenant_scope("alice")), namespace(tenant_scope("bob"))
    provider = provider_with(text, where=alice)
    assert found_by(provider, text, alice) == ["0"]
    for stranger in (bob, namespace(""), namespace(None)):
        assert found_by(provider, text, stranger) == []
    assert provider.counts["no_partition"] == 2
    assert provider.counts["tenant_unknown"] == 1


def test_an_unknown_tenant_is_nobody_not_even_another_unknown_one() -> None:
    unknown = namespace(None)
    text = document(42, 2_000)
    assert found_by(provider_with(text, where=unknown), text, unknown) == []


def test_only_one_partition_is_ever_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant is not a filter on results: other tenants' postings are not even read."""
    tenants = [namespace(tenant_scope(name)) for name in ("a", "b", "c")]
    text = document(43, 2_000)
    provider = FingerprintProvider()
    for n, where in enumerate(tenants):
        provider.donor_added(donor(str(n), text, where))
    asked: list[str] = []
    for digest, (_, partition) in provider._partitions.items():
        find = partition.find
        monkeypatch.setattr(partition, "find", lambda f, d=digest, find=find: (asked.append(d), find(f))[1])
    assert found_by(provider, text, tenants[1]) == ["1"]
    assert asked == [tenants[1].digest().hex()]


TENANTS = [None, "", "alice", "bob", " bob", "alice\0", "ALICE"]
TEXTS = [document(600 + n, 700) for n in range(3)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(TENANTS), st.integers(0, 2), st.booleans()), max_size=24),
    st.sampled_from(TENANTS),
    st.integers(0, 2),
    st.sampled_from(["model", "lora", "lora_revision", "kv_dtype", "engine", None]),
)
def test_no_history_of_adds_and_removes_lets_one_namespace_see_another(
    history: list[tuple[int, str | None, int, bool]], asker: str | None, text: int, differing: str | None
) -> None:
    provider = FingerprintProvider()
    owners: dict[str, str] = {}
    for donor_number, tenant, which, add in history:
        where = namespace(tenant)
        donor_id = f"d{donor_number}"
        if add:
            provider.donor_added(donor(donor_id, TEXTS[which], where))
            owners[donor_id] = where.digest().hex()
        else:
            provider.donor_removed(donor_id)
            owners.pop(donor_id, None)
    where = namespace(asker, **({differing: "y"} if differing is not None else {}))
    matches = provider.lookup(query_of(TEXTS[text], where))
    assert all(owners[match.donor_id] == where.digest().hex() for match in matches)
    if asker is None or differing is not None:
        assert not matches


def test_lookups_while_donors_come_and_go() -> None:
    """Two threads: no exception, and a donor that is there all the time is found every time."""
    fixed = document(50, 1_500)
    provider = provider_with(fixed)
    query = query_of(fixed, NS)
    stop = threading.Event()
    failures: list[Exception] = []

    def look() -> None:
        try:
            while not stop.is_set():
                matches = provider.lookup(query)
                assert matches
                assert matches[0].donor_id == "0"
        except (AssertionError, ValueError, IndexError, KeyError, RuntimeError) as error:
            failures.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    donors = [donor(f"x{n}", document(700 + n, 600), NS) for n in range(60)]
    for _ in range(5):
        for one in donors:
            provider.donor_added(one)
        for one in donors:
            provider.donor_removed(one.donor_id)
    stop.set()
    reader.join()
    assert failures == []
    assert provider.counts["lookups"] > 0


def test_snapshot_holds_counts_and_no_content() -> None:
    import json

    provider = provider_with(*BACKGROUND)
    found_by(provider, BACKGROUND[0])
    plain = json.loads(json.dumps(provider.snapshot()))
    assert plain["donors"] == 30
    assert plain["counts"]["lookups"] == 1
    assert NS.digest().hex() not in json.dumps(plain)


def test_what_is_rare_of_a_prompt_weighs_as_rare_beside_a_template_that_is_not() -> None:
    """No fingerprint of the prompt is there twice, so each one's rarity is kept by its place."""
    rng = np.random.default_rng(3)
    template, own, *bodies = (rng.integers(0, 2**32, n, dtype=np.uint32) for n in (3_000, 600, *[3_000] * 41))
    provider = provider_with(*(joined(template, body) for body in bodies[:40]), joined(own, bodies[40], bodies[39]))
    found = {match.donor_id: match for match in provider.lookup(query_of(joined(template, own), NS))}
    assert found.pop("40").confidence > 0.85 > 0.6 > max(match.confidence for match in found.values())
