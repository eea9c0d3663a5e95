"""Hypothesis strategies for every type that crosses a process boundary: valid values only."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.codec import MAX_SECONDS
from dynamo_semkv.contracts.donor_events import (
    DonorEvent,
    DonorEvicted,
    DonorRegistered,
    DonorRelocated,
    DonorSegment,
    DonorsPurged,
    GenerationReset,
    PurgeAll,
    PurgeLocation,
    PurgeWorker,
    WireNamespace,
)
from dynamo_semkv.contracts.evidence import (
    Bucket,
    MatchType,
    SemanticTrtBlockRef,
    SemanticTrtMatch,
    SemanticTrtSegment,
)
from dynamo_semkv.contracts.hints import DonorHint, FetchHint, HintDelivery, KvHintAction, KvHintsEnvelope
from dynamo_semkv.contracts.identity import DP_RANK_MAX, U64_MAX
from dynamo_semkv.contracts.load_plan import ExpectedMode, SemanticTrtLoadPlan
from dynamo_semkv.contracts.location import SharedLocation, Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.pack import MAX_PACK_RECORDS, Pack
from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened, SheetLine

text = st.text(st.characters(codec="utf-8"), max_size=12)
maybe_text = st.none() | text
u64 = st.integers(0, U64_MAX)
ranks = st.integers(0, DP_RANK_MAX)
tokens = st.integers(0, 2**31 - 1)
seconds = st.floats(0, MAX_SECONDS, allow_nan=False)
keys = st.binary(min_size=16, max_size=16)
stable_ids = st.from_regex(r"[A-Za-z0-9._:-]{1,20}", fullmatch=True)
route_ids = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
donor_ids = st.from_regex(r"[\x21-\x7e]{1,20}", fullmatch=True)
generations = st.integers(0, 2**63 - 1) | text
versions = st.sampled_from(["1.0", "1.7", "1"])

namespaces = st.builds(
    CacheNamespace,
    **{name: maybe_text for name in CacheNamespace.__struct_fields__ if name not in ("tokens_per_block", "multimodal")},
    tokens_per_block=st.none() | st.integers(1, 65_536),
    multimodal=st.none() | st.lists(text, max_size=3).map(tuple),
)
worker_locations = st.builds(WorkerLocation, u64, ranks, st.sampled_from(Tier))
locations = worker_locations | st.builds(SharedLocation, text, st.sampled_from(Tier), text)


@st.composite
def registered(draw: st.DrawFn) -> DonorRegistered:
    token_count = draw(st.integers(1, 2**31))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, token_count - 1))
        segments.append(
            DonorSegment(
                segment_id=draw(st.integers(0, 2**63) | text),
                token_range=(start, draw(st.integers(start + 1, token_count))),
                digest=draw(u64),
                block_hashes=draw(st.none() | st.lists(u64, max_size=3)),
                provider_metadata=draw(st.none() | st.binary(max_size=40)),
            )
        )
    return DonorRegistered(
        donor_id=draw(donor_ids),
        namespace=WireNamespace(
            model=draw(text),
            tokenizer=draw(text),
            kv_layout=draw(text),
            block_size=draw(st.integers(1, 1024)),
            lora=draw(maybe_text),
            quant=draw(maybe_text),
            extra=draw(st.dictionaries(text, text, max_size=3)),
        ),
        location=draw(locations),
        token_count=token_count,
        segments=segments,
        provider_generation=draw(generations),
        ttl=draw(st.none() | st.floats(0.0, 1e10)),
    )


donor_event_data = (
    registered()
    | st.builds(
        DonorEvicted,
        donor_id=donor_ids,
        provider_generation=generations,
        segments=st.none() | st.lists(st.integers(0, 2**63) | text, max_size=3),
    )
    | st.builds(DonorRelocated, donor_id=donor_ids, new_location=locations, provider_generation=generations)
    | st.builds(
        DonorsPurged,
        scope=st.builds(PurgeWorker, u64) | st.builds(PurgeLocation, locations) | st.just(PurgeAll()),
        provider_generation=generations,
    )
    | st.builds(GenerationReset, generation=generations)
)
donor_events = st.builds(
    DonorEvent, schema_version=st.just(1), event_id=u64, worker_id=u64, dp_rank=ranks, data=donor_event_data
)


@st.composite
def reports(draw: st.DrawFn) -> MaterializationReport:
    prompt = draw(tokens)
    local = draw(st.integers(0, prompt))
    counts = sorted(draw(st.lists(st.integers(0, prompt - local), min_size=4, max_size=4)))
    return MaterializationReport(
        version=draw(versions),
        report_id=draw(text),
        stable_routing_id=draw(stable_ids),
        dp_rank=draw(ranks),
        generation=draw(text),
        prompt_key=draw(keys),
        namespace=draw(text),
        route_id=draw(st.none() | route_ids),
        donor_id=draw(st.none() | donor_ids),
        request_id=draw(st.integers(0, U64_MAX)),
        epoch=draw(st.integers(0, 100)),
        prompt_tokens=prompt,
        local_tokens=local,
        confirmed=counts[0],
        copied=counts[1],
        honoured=counts[2],
        offered=counts[3],
        outcome=draw(st.sampled_from(Outcome)),
        reason=draw(st.sampled_from(Reason)),
        tier=draw(st.none() | st.sampled_from(Tier)),
        load_seconds=draw(st.none() | seconds),
        differing_field=draw(maybe_text),
        traceparent=draw(maybe_text),
    )


signed = st.integers(-(2**40), 2**40)
sheet_lines = st.builds(
    SheetLine,
    replica=text,
    filtered_by=maybe_text,
    **dict.fromkeys(("total", "device", "host", "disk", "donor", "load", "decode", "extra"), signed),
)

routes_opened = st.builds(
    RouteOpened,
    version=versions,
    route_id=route_ids,
    request_id=maybe_text,
    router=stable_ids,
    attempt=st.integers(0, 10),
    model=text,
    mode=st.sampled_from(["off", "shadow", "canary", "enforce"]),
    opened_at=seconds,
    prompt_key=keys,
    input_tokens=tokens,
    exact_device_tokens=tokens,
    exact_host_tokens=tokens,
    dynamo_choice=maybe_text,
    sheet=st.lists(sheet_lines, max_size=8).map(tuple),
    sheet_rows=tokens,
    quality_signals=st.dictionaries(
        st.text(st.characters(max_codepoint=127), min_size=1, max_size=32),
        st.floats(-(2.0**63), 2.0**63, allow_nan=False),
        max_size=8,
    ),
    evidence_tokens=tokens,
    placed_tokens=tokens,
    hinted_tokens=tokens,
    lookup_seconds=seconds,
    stable_routing_id=st.none() | stable_ids,
    dp_rank=st.none() | ranks,
    worker_id=st.none() | u64.map(str),
    donor_id=st.none() | donor_ids,
    match_type=st.none() | st.sampled_from(MatchType),
    overlap=st.sampled_from(Bucket),
    tier=st.none() | st.sampled_from(Tier),
    materialization=st.none() | st.sampled_from(["off", "exact", "experimental"]),
    expected_tokens=st.none() | st.integers(-(2**31), 2**31),
    shadow_choice=maybe_text,
)
routes_observed = st.builds(
    RouteObserved,
    version=versions,
    route_id=route_ids,
    observed_at=seconds,
    end=st.sampled_from(["complete", "cancelled", "worker_lost", "error"]),
    served_stable_routing_id=st.none() | stable_ids,
    served_dp_rank=st.none() | ranks,
    ttft_seconds=st.none() | seconds,
    queued_tokens=st.none() | tokens,
    output_tokens=tokens,
    engine_cached_tokens=st.none() | tokens,
)
announcements = st.builds(
    ReplicaAnnouncement,
    version=versions,
    stable_routing_id=stable_ids,
    dp_rank=ranks,
    generation=text,
    model=text,
    namespace=namespaces,
    materialization=st.sampled_from(["off", "exact", "experimental"]),
    request_local_kv=st.booleans(),
    slab_blocks=tokens,
    resident_blocks=tokens,
    connector_version=text,
)
donor_hints = st.builds(
    DonorHint,
    route_id=route_ids,
    donor_id=donor_ids,
    expected_mode=st.sampled_from(ExpectedMode),
    generation=text,
    namespace=text,
    token_count=tokens,
    exact_prefix_tokens=tokens,
    score_bucket=st.sampled_from(Bucket),
)
fetch_hints = st.builds(FetchHint, source_control_endpoint=text, block_hashes=st.lists(u64, max_size=5))
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
envelopes = st.builds(
    KvHintsEnvelope,
    protocol_version=st.just("0.1"),
    message_id=text,
    actions=st.lists(
        st.builds(
            KvHintAction,
            action_id=text,
            action_type=text,
            action_version=text,
            payload=st.dictionaries(text, json_values, max_size=3),
        ),
        max_size=3,
    ),
)
hint_deliveries = st.builds(
    HintDelivery,
    version=versions,
    stable_routing_id=stable_ids,
    dp_rank=ranks,
    prompt_key=keys,
    envelope=envelopes,
    traceparent=maybe_text,
)
packs = st.builds(
    Pack,
    version=st.sampled_from(["2.0", "2.1"]),
    content_type=maybe_text,
    records=st.lists(st.binary(max_size=40), min_size=1, max_size=MAX_PACK_RECORDS).map(tuple),
)
block_refs = st.builds(
    SemanticTrtBlockRef, block_key=keys, ordinal=st.integers(0, 2**31), location=st.none() | locations
)
matches = st.builds(
    SemanticTrtMatch,
    donor_id=donor_ids,
    reusable_token_count=tokens,
    exact_prefix_tokens=tokens,
    match_type=st.sampled_from(MatchType),
    location=locations,
    provider=text,
    provider_generation=text,
    segments=st.lists(
        st.builds(
            SemanticTrtSegment,
            target_start=tokens,
            donor_start=tokens,
            token_count=st.integers(1, 2**31),
            donor_block_refs=st.lists(block_refs, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    overlap=st.floats(0, 1),
    confidence=st.floats(0, 1),
    edited=st.booleans(),
)
load_plans = st.builds(
    SemanticTrtLoadPlan,
    request_id=u64,
    epoch=st.integers(0, 100),
    route_id=st.none() | route_ids,
    donor_id=donor_ids,
    provider_generation=text,
    cache_namespace=text,
    expected_mode=st.sampled_from(ExpectedMode),
    first_ordinal=st.integers(0, 100),
    target_block_ids=st.lists(st.integers(-1, 2**31), max_size=4).map(tuple),
    donor_block_refs=st.lists(block_refs, max_size=4).map(tuple),
    token_count=tokens,
    semantic_score_bucket=text,
)
