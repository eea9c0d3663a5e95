"""The golden vectors: a pure function of nothing, in plain JSON types.

`python -m tests.contracts.golden` prints them; with `--write` it replaces golden.json. A change of golden.json is a
change of the wire contract: engines and routers of the two versions no longer understand each other's keys.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from dynamo_semkv.contracts import codec, subjects
from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.donor_events import DonorEvent, DonorRegistered, DonorSegment, WireNamespace
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.hints import DonorHint, HintDelivery, KvHintsEnvelope
from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id
from dynamo_semkv.contracts.keys import as_tokens, block_keys, prompt_key, root_key
from dynamo_semkv.contracts.load_plan import ExpectedMode
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace, semblend_tenant_key, tenant_scope
from dynamo_semkv.contracts.pack import Pack
from dynamo_semkv.contracts.report import MaterializationReport, Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.contracts.sketch import DonorSketch

PATH = Path(__file__).with_name("golden.json")
BLOCK = 32
SALT_KEY = bytes(range(32))
SALT = "tenant-a"

BASE = CacheNamespace(
    model="llama@rev-1",
    engine="tensorrt_llm/1.2.0",
    tokenizer="llama",
    prompt_format="token-ids",
    backend_mode="pytorch",
    tokens_per_block=BLOCK,
    kv_dtype="auto/float16",
    kv_layout="layout-1",
    attention_window="full",
    attention_shape="8/2;64B/token",
    parallelism="tp=1",
    ptuning="",
    speculative="",
    multimodal_policy="content-hash",
    connector="semkv/1",
    provider_generation="0",
)


def tokens(seed: int, count: int) -> list[int]:
    """Any program can make these: the upper bits of an LCG, below 50,000."""
    state, made = seed, []
    for _ in range(count):
        state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        made.append((state >> 33) % 50_000)
    return made


def namespaces() -> dict[str, CacheNamespace]:
    """A base without a request, and what each kind of request makes of it."""
    scope = tenant_scope(SALT, SALT_KEY)
    return {
        "engine": BASE,
        "plain": BASE.for_request(tenant=""),
        "salted": BASE.for_request(tenant=scope),
        "other_salt": BASE.for_request(tenant=tenant_scope("tenant-b", SALT_KEY)),
        "lora": BASE.for_request(tenant="", lora="1", lora_revision="rev-a"),
        "lora_other_revision": BASE.for_request(tenant="", lora="1", lora_revision="rev-b"),
        "other_lora": BASE.for_request(tenant="", lora="2", lora_revision="rev-a"),
        "image": BASE.for_request(tenant="", multimodal=("00" * 32,)),
        "other_image": BASE.for_request(tenant="", multimodal=("11" * 32,)),
        "everything": BASE.for_request(
            tenant=scope, lora="1", lora_revision="rev-a", multimodal=("00" * 32, "11" * 32)
        ),
        "unicode": msgspec.structs.replace(BASE, model="Üñï/模型@é").for_request(tenant=""),
    }


def messages() -> dict[str, bytes]:
    """One of each message of ours. What is stored decodes for ever; what is encoded now may have more fields."""
    replica = StableReplica("worker-0", 1)
    spaces = namespaces()
    prompt = tokens(1, 100)
    key = prompt_key(spaces["salted"].digest(), prompt)
    donor = DonorHint(
        route_id="0" * 32,
        donor_id="d" * 32,
        expected_mode=ExpectedMode.EXACT_EQUIVALENT,
        generation="g1",
        namespace=spaces["salted"].digest().hex(),
        token_count=96,
        exact_prefix_tokens=64,
        score_bucket=Bucket.HIGH,
    )
    envelope = KvHintsEnvelope(protocol_version="0.1", message_id="m1", actions=[codec.donor_action("a1", donor)])
    sketch = DonorSketch.of(
        as_tokens(prompt), spaces["salted"].digest(), block_keys(spaces["salted"].digest(), prompt, BLOCK)
    )
    event = DonorEvent(
        schema_version=1,
        event_id=7,
        worker_id=stable_worker_id(replica.stable_routing_id),
        dp_rank=replica.dp_rank,
        data=DonorRegistered(
            donor_id="d" * 32,
            namespace=WireNamespace(model="llama", tokenizer="llama", kv_layout="layout-1", block_size=BLOCK),
            location=WorkerLocation(stable_worker_id(replica.stable_routing_id), 1, Tier.HOST_PINNED),
            token_count=100,
            segments=[DonorSegment(segment_id=0, token_range=(0, 96), digest=5, provider_metadata=sketch.to_bytes())],
            provider_generation="g1",
        ),
    )
    return {
        "report": codec.encode_report(
            MaterializationReport(
                version="1.0",
                report_id="r1",
                stable_routing_id="worker-0",
                dp_rank=1,
                generation="g1",
                prompt_key=key,
                namespace=spaces["salted"].digest().hex(),
                route_id="0" * 32,
                prompt_tokens=100,
                local_tokens=0,
                offered=96,
                honoured=96,
                copied=96,
                confirmed=96,
                outcome=Outcome.MATERIALIZED_EXACT,
                reason=Reason.OK,
                tier=Tier.HOST_PINNED,
                load_seconds=0.25,
            )
        ),
        "announcement": codec.encode_announcement(
            ReplicaAnnouncement(
                version="1.0",
                stable_routing_id="worker-0",
                dp_rank=1,
                generation="g1",
                model="llama",
                namespace=BASE,
                materialization="exact",
            )
        ),
        "route_opened": codec.encode_route_event(
            RouteOpened(
                route_id="0" * 32,
                router="semkv-0",
                attempt=0,
                model="llama",
                mode="enforce",
                opened_at=1.5,
                prompt_key=key,
                input_tokens=100,
                match_type=MatchType.EXACT_EQUIVALENT,
            )
        ),
        "route_observed": codec.encode_route_event(
            RouteObserved(route_id="0" * 32, observed_at=2.5, end="complete", ttft_seconds=0.5)
        ),
        "pack": codec.encode_pack(Pack(content_type=codec.MSGPACK, records=(b"one", b"", bytes(range(256))))),
        "hint_delivery": codec.encode_hint_delivery(
            HintDelivery(version="1.0", stable_routing_id="worker-0", dp_rank=1, prompt_key=key, envelope=envelope)
        ),
        "donor_event_msgpack": codec.encode_donor_event(event, codec.MSGPACK),
        "donor_event_json": codec.encode_donor_event(event, codec.JSON),
    }


PROMPTS = ((1, 0), (1, 31), (1, 32), (1, 100), (2, 100), (3, 1000))
STABLE_IDS = ("worker-0", "worker-1", "a", "ns.pod:8000_x-Y")


def compute() -> dict[str, Any]:
    """As JSON reads it back: lists, no tuples."""
    computed: dict[str, Any] = json.loads(json.dumps(_compute()))
    return computed


def _compute() -> dict[str, Any]:
    spaces = namespaces()
    sketched = tokens(3, 1000)
    return {
        "salt_key": SALT_KEY.hex(),
        "tenant_scopes": {
            salt: [tenant_scope(salt), tenant_scope(salt, SALT_KEY)] for salt in (SALT, "tenant-b", " ", "é😀")
        },
        "semblend_tenant_keys": {salt: semblend_tenant_key(salt) for salt in (SALT, "tenant-b", "é😀")},
        "namespaces": {
            name: {"fields": msgspec.to_builtins(space), "digest": space.digest().hex()}
            for name, space in spaces.items()
        },
        "tokens": {f"{seed}/{count}": tokens(seed, count)[:8] for seed, count in PROMPTS},
        "keys": [
            {
                "namespace": name,
                "seed": seed,
                "count": count,
                "root": root_key(space.digest()).hex(),
                "block_keys": [key.hex() for key in block_keys(space.digest(), tokens(seed, count), BLOCK)],
                "prompt_key": prompt_key(space.digest(), tokens(seed, count)).hex(),
            }
            for name, space in spaces.items()
            for seed, count in (PROMPTS if name in ("plain", "salted") else ((1, 100),))
        ],
        "stable_worker_ids": {stable: str(stable_worker_id(stable)) for stable in STABLE_IDS},
        "subjects": {stable: subjects.hints(StableReplica(stable, 1)) for stable in STABLE_IDS},
        "sketches": {
            name: DonorSketch.of(
                as_tokens(sketched), spaces[name].digest(), block_keys(spaces[name].digest(), sketched, BLOCK)
            )
            .to_bytes()
            .hex()
            for name in ("plain", "salted")
        },
        "messages": {name: raw.hex() for name, raw in messages().items()},
    }


def stored() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(PATH.read_text())
    return loaded


if __name__ == "__main__":
    text = json.dumps(compute(), indent=1, ensure_ascii=True) + "\n"
    if "--write" in sys.argv[1:]:
        PATH.write_text(text)
    else:
        sys.stdout.write(text)
