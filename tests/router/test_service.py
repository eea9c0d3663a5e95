"""One request through RouterService on fakes: what is advised, what is recorded, and that no fault of ours reaches the
client."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.codec import (
    decode_route_event,
    encode_route_event,
    envelope_from_plain,
    parse_donor_payload,
)
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.namespace import tenant_scope
from dynamo_semkv.evidence.deadline import LookupResult
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.observe.snapshot import explain_request
from dynamo_semkv.router.runtime_types import RankOverlap
from tests.outcome.build import Listener, report
from tests.router.fakes import (
    A0,
    A1,
    B0,
    B1,
    NAMESPACE,
    FakeEdge,
    FakeLookup,
    FakeRouter,
    Found,
    a_request,
    announcement,
    chunks,
    donor_on_a1,
    match,
)


async def test_a_donor_is_placed_on_hinted_both_ways_and_recorded() -> None:
    fake = FakeRouter(edge=FakeEdge(script=chunks(3, cached=960, prompt=1024)), lookup=donor_on_a1())
    got = await fake.run()
    assert [c["token_ids"] for c in got] == [[0], [1], [2]]
    assert fake.dispatch.pin == A1
    opened, ended = fake.opened, fake.ended
    assert (opened.mode, opened.decision_reason, opened.lookup) == ("enforce", "placed", "hit")
    assert (opened.stable_routing_id, opened.dp_rank, opened.worker_id) == ("w-a", 1, "11")
    assert (opened.input_tokens, opened.evidence_tokens, opened.placed_tokens, opened.hinted_tokens) == (
        1024,
        960,
        960,
        960,
    )
    assert opened.quality_signals == {"evidence": 12.5}
    assert (opened.donor_id, opened.provider, opened.tier) == ("d" * 32, "fingerprint", Tier.HOST_PINNED)
    assert (opened.request_id, opened.attempt, opened.traceparent) == ("req-1", 0, "00-t-s-01")
    assert fake.dispatch.sent is not None
    envelope = envelope_from_plain(fake.dispatch.sent["extra_args"]["semkv"])
    hint = parse_donor_payload(envelope.actions[0])
    assert (hint.route_id, hint.donor_id, hint.token_count) == (opened.route_id, "d" * 32, 960)
    ((replica, key, sent),) = fake.hints.sent
    assert (replica, key) == (StableReplica("w-a", 1), opened.prompt_key)
    assert sent == envelope
    assert (ended.end, ended.output_tokens, ended.engine_cached_tokens) == ("complete", 3, 960)
    assert (ended.served_stable_routing_id, ended.served_dp_rank, ended.served_worker_id) == ("w-a", 1, "11")
    assert ended.ttft_seconds is not None
    assert ended.ttft_seconds >= 0
    # What calibration needs to turn the route's outcome into seconds and into the right cell.
    assert opened.materialization == "exact"
    assert opened.expected_tokens == round(960 * 0.9 * 0.75)
    assert ended.queued_tokens == 0
    assert fake.fallbacks.counts == {}
    assert fake.dispatch.closed


@pytest.mark.parametrize("placed", [True, False])
async def test_what_a_provider_writes_is_not_what_the_engine_is_sent(placed: bool) -> None:
    """It can, whatever the array says of itself: torch does not ask."""

    class Scribbling(FakeLookup):
        async def lookup(self, query: LookupQuery) -> LookupResult:
            assert not query.tokens.flags.writeable
            query.tokens.flags.writeable = True
            query.tokens[:] = 7
            return await super().lookup(query)

    fake = FakeRouter(lookup=Scribbling(donor_on_a1().found if placed else Found(status="miss")))
    request = a_request()
    await fake.run(request)
    assert (fake.dispatch.pin == A1) is placed
    assert fake.dispatch.tokens is not None
    assert fake.dispatch.tokens.tolist() == request["token_ids"]


async def test_everything_else_in_the_request_goes_through_unchanged() -> None:
    request = a_request(
        routing={"priority_jump": 2.0, "cache_salt": "t"}, extra_args={"nvext": {"extra_fields": ["timing"]}}
    )
    before = {**request, "extra_args": dict(request["extra_args"])}
    fake = FakeRouter(lookup=donor_on_a1())
    await fake.run(request)
    assert request == before
    sent = fake.dispatch.sent
    assert sent is not None
    assert sent["extra_args"].pop("semkv")
    assert sent == before


async def test_the_queue_of_the_replica_that_served_is_recorded_whoever_chose_it() -> None:
    fake = FakeRouter(edge=FakeEdge(queued={A0: 7, B1: 300}, dynamos_choice=B1))
    await fake.run()
    assert fake.opened.expected_tokens is None
    assert fake.opened.materialization is None
    assert fake.ended.queued_tokens == 300


async def test_off_is_as_if_we_were_not_there() -> None:
    fake = FakeRouter({"placement": {"mode": "off"}}, lookup=donor_on_a1())
    assert len(await fake.run()) == 3
    assert fake.dispatch.pin is None
    assert fake.edge.asked == []
    assert fake.lookup.queries == []
    assert fake.journal.opens == fake.journal.ends == []


async def test_shadow_records_and_touches_nothing() -> None:
    fake = FakeRouter({"placement": {"mode": "shadow"}}, lookup=donor_on_a1())
    request = a_request()
    await fake.run(request)
    assert fake.dispatch.pin is None
    assert fake.dispatch.sent == request
    assert fake.hints.sent == []
    opened = fake.opened
    assert (opened.mode, opened.decision_reason, opened.shadow_choice) == ("shadow", "shadow", "w-a/1")
    assert (opened.evidence_tokens, opened.placed_tokens, opened.hinted_tokens) == (960, 0, 0)
    assert opened.stable_routing_id is None
    assert fake.ended.served_stable_routing_id == "w-b"


async def test_canary_acts_on_its_share_only() -> None:
    fake = FakeRouter({"placement": {"mode": "canary", "canary_percent": 50.0}}, lookup=donor_on_a1())
    for i in range(40):
        await fake.run(request_id=f"request-{i}")
    modes = {o.mode for o in fake.journal.opens}
    assert modes == {"canary", "shadow"}
    for opened, dispatch in zip(fake.journal.opens, fake.edge.dispatched, strict=True):
        assert (dispatch.pin is not None) == (opened.mode == "canary")


async def test_hints_off_places_and_hints_nothing() -> None:
    fake = FakeRouter({"hints": {"enabled": False}}, lookup=donor_on_a1())
    await fake.run()
    assert fake.dispatch.pin == A1
    assert fake.dispatch.sent is not None
    assert fake.dispatch.sent["extra_args"] is None
    assert fake.hints.sent == []
    assert (fake.opened.placed_tokens, fake.opened.hinted_tokens) == (960, 0)


@pytest.mark.parametrize(
    "pin",
    [
        {"routing": {"backend_instance_id": 22, "dp_rank": 0}},
        {"routing": {"decode_worker_id": 22}},
        {"routing": {"dp_rank": 0}},
        {"extra_args": {"nvext": {"backend_instance_id": 22}}},
        {"agent_context": {"session_id": "s"}},
    ],
    ids=str,
)
async def test_a_clients_own_pin_or_session_is_never_overridden(pin: dict[str, Any]) -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    request = a_request(**pin)
    await fake.run(request)
    assert fake.dispatch.pin is None
    assert fake.dispatch.sent == request
    assert fake.opened.decision_reason == "client_pinned"
    assert fake.opened.stable_routing_id is None


async def test_llm_d_router_242_what_a_client_sends_as_a_hint_is_stripped() -> None:
    fake = FakeRouter()
    forged = {"protocol_version": "0.1", "message_id": "x", "actions": [{"source_control_endpoint": "tcp://evil:1"}]}
    await fake.run(
        a_request(
            kv_hint=forged,
            kv_transfer_params={"remote_host": "evil"},
            extra_args={"semkv": forged, "kv_hints": forged, "nvext": {"semkv": forged, "extra_fields": ["timing"]}},
        )
    )
    assert "evil" not in str(fake.dispatch.sent)
    assert fake.dispatch.sent is not None
    assert fake.dispatch.sent["extra_args"] == {"nvext": {"extra_fields": ["timing"]}}
    assert fake.service.counts["hints_stripped"] == 5


async def test_exact_device_overlap_that_suffices_skips_the_lookup() -> None:
    fake = FakeRouter(edge=FakeEdge(ranks={B0: RankOverlap(30, 0, 0)}), lookup=donor_on_a1())
    await fake.run()
    assert fake.lookup.queries == []
    assert (fake.opened.lookup, fake.opened.decision_reason) == ("skipped", "exact_covers")
    assert fake.opened.exact_device_tokens == 960
    assert fake.dispatch.pin is None


async def test_a_miss_leaves_the_choice_to_dynamo() -> None:
    fake = FakeRouter()
    await fake.run()
    assert (fake.opened.lookup, fake.opened.decision_reason) == ("miss", "no_evidence")
    assert fake.dispatch.pin is None
    assert fake.ended.served_worker_id == str(B1.worker_id)


async def test_host_tier_residency_is_evidence_without_a_donor() -> None:
    fake = FakeRouter(edge=FakeEdge(ranks={B0: RankOverlap(0, 24, 0)}))
    await fake.run()
    assert fake.dispatch.pin == B0
    opened = fake.opened
    assert (opened.provider, opened.tier, opened.match_type) == ("dynamo", Tier.HOST_PINNED, MatchType.EXACT_EQUIVALENT)
    assert (opened.exact_host_tokens, opened.placed_tokens, opened.hinted_tokens) == (768, 768, 768)
    assert opened.donor_generation == "g1"


async def test_semantic_router_2134_tenants_search_partitions_of_their_own() -> None:
    fake = FakeRouter()
    for salt in ("tenant-a", "tenant-b", None):
        await fake.run(a_request(routing={"cache_salt": salt}))
    a, b, none = fake.lookup.queries
    assert len({a.digest, b.digest, none.digest}) == 3
    assert a.namespace.tenant == tenant_scope("tenant-a")
    assert none.namespace.tenant == ""
    assert len({o.prompt_key for o in fake.journal.opens}) == 3
    assert [asked[2] for asked in fake.edge.asked] == ["tenant-a", "tenant-b", None]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routing": {"lora_name": "adapter"}}, "adapter_unknown"),
        ({"multi_modal_data": {"image_url": [{"Url": "http://x"}]}}, "multimodal_unhashed"),
        ({"routing": {"cache_salt": ""}}, "salt_unknown"),
    ],
)
async def test_vllm_44250_what_cannot_be_told_apart_is_not_looked_up_and_says_so(
    changes: dict[str, Any], reason: str
) -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    request = a_request(**changes)
    await fake.run(request)
    assert fake.lookup.queries == []
    assert fake.dispatch.sent == request
    assert fake.opened.decision_reason == reason


async def test_lmcache_4086_media_with_hashes_has_a_partition_of_its_own() -> None:
    fake = FakeRouter()
    media = {"multi_modal_data": {"image_url": [{"Url": "http://x"}]}}
    for image in ("a" * 64, "b" * 64):
        await fake.run(a_request(**media, extra_args={"mm_hashes": [image]}))
    await fake.run()
    assert len({query.digest for query in fake.lookup.queries}) == 3


async def test_replicas_that_disagree_get_no_advice_and_the_reason_is_recorded() -> None:
    fake = FakeRouter(lookup=donor_on_a1(), announce=False)
    await fake.run()
    assert fake.journal.opens[-1].decision_reason == "namespace_unknown"
    for stable, dtype in (("w-a", "bfloat16"), ("w-b", "fp8")):
        namespace = type(NAMESPACE)(model="m@1", tokens_per_block=32, kv_dtype=dtype)
        fake.directory.announce(announcement(stable, 0, namespace=namespace))
    await fake.run(request_id="2")
    assert fake.journal.opens[-1].decision_reason == "namespace_differs"
    assert [d.pin for d in fake.edge.dispatched] == [None, None]


async def test_production_stack_1061_a_donor_on_an_unknown_replica_is_ignored() -> None:
    fake = FakeRouter(lookup=FakeLookup(Found([match(("w-gone", 0), 960)])))
    assert len(await fake.run()) == 3
    assert (fake.opened.decision_reason, fake.opened.evidence_tokens) == ("donor_unreachable", 0)
    assert fake.directory.counts["unresolved"] == 1
    assert fake.dispatch.pin is None


async def test_a_worker_that_died_since_the_last_request_is_not_pinned_to() -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    await fake.run()
    fake.edge.live = {key: value for key, value in fake.edge.live.items() if key not in (A0, A1)}
    await fake.run(request_id="2")
    assert [d.pin for d in fake.edge.dispatched] == [A1, None]


async def test_llm_d_router_1892_two_routers_decide_alike_from_the_same_state() -> None:
    fakes = [FakeRouter(lookup=donor_on_a1(), router=name) for name in ("r1", "r2")]
    for i in range(10):
        for fake in fakes:
            await fake.run(request_id=f"request-{i}")
    one, two = (
        [(o.decision_reason, o.worker_id, o.dp_rank, o.prompt_key) for o in fake.journal.opens] for fake in fakes
    )
    assert one == two
    assert {o.router for fake in fakes for o in fake.journal.opens} == {"r1", "r2"}


async def test_what_a_client_chooses_is_cut_before_it_is_written_down() -> None:
    """What is longer than others take would cost the route its record: it still joins, and is found by the id that the
    client knows."""
    chosen = "r" * 8_000
    fake = FakeRouter(edge=FakeEdge(script=chunks(3, cached=960, prompt=1024)), lookup=donor_on_a1())
    for _ in range(2):
        await fake.run(a_request(model="m" * 8_000), request_id=chosen)
    outcomes = Listener()
    for number, (opened, ended) in enumerate(zip(fake.journal.opens, fake.journal.ends, strict=True)):
        for event in (opened, ended):
            assert decode_route_event(encode_route_event(event)) == event
        assert (len(opened.request_id or ""), len(opened.model), opened.attempt) == (512, 512, number)
        outcomes.tracker.opened(opened, 1.0)
        outcomes.tracker.observed(ended, 2.0)
        served = {"stable_routing_id": ended.served_stable_routing_id or "w-a", "dp_rank": ended.served_dp_rank or 0}
        said = {"prompt_key": opened.prompt_key, "route_id": opened.route_id, **served}
        outcomes.tracker.report(report(number, confirmed=0, **said), 2.0)
    assert [route.report is not None for route in outcomes.closed] == [True, True]
    listed = explain_request(outcomes.history, f"chatcmpl-{chosen}")
    assert [row["opened"]["route_id"] for row in listed] == [event.route_id for event in fake.journal.opens]
