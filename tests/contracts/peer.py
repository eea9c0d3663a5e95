"""A process that runs one release of the packages that speak on the bus: a kept one (releases/*.zip), or this checkout.

    python -I peer.py PLACE write               one of each message, as that release writes them: {name: hex}
    python -I peer.py PLACE read                {name: hex} from standard input -> {name: what it read | {"refused": ..., "error": ...}}
    python -I peer.py PLACE worker URL NUMBERS [packs]
                                                publishes an announcement, a donor and a report for each number with its own BusPublisher
    python -I peer.py PLACE router URL NUMBERS WORKER [packs]
                                                publishes the route events of the numbers, served by WORKER; then, for each line of
                                                standard input, says what its own Intake and RouteTracker have made of the bus so far

`packs`: a release that can write several records in one message does.

Nothing but PLACE's own code and what both releases have in common (names and signatures) is used here. The plain values
below name every field of the newest release; an older one leaves out what it does not know.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

KEY = b"0123456789abcdef"
NAMESPACE = {
    **dict.fromkeys(
        (
            "model", "engine", "tokenizer", "prompt_format", "backend_mode", "kv_dtype", "kv_layout", "attention_window",
            "attention_shape", "parallelism", "ptuning", "speculative", "multimodal_policy", "connector", "provider_generation",
        ),
        "x",
    ),
    "tokens_per_block": 32,
}  # fmt: skip
LOCATION = {"kind": "worker", "worker_id": 7, "dp_rank": 1, "tier": "host_pinned"}
DONOR_HINT = {
    "route_id": "0" * 32, "donor_id": "d" * 32, "expected_mode": "exact_equivalent", "generation": "g1", "namespace": "ab" * 32,
    "token_count": 96, "exact_prefix_tokens": 64, "score_bucket": "high", "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
}  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "report": {
        "version": "1.0", "report_id": "r1", "stable_routing_id": "worker-0", "dp_rank": 1, "generation": "g1", "prompt_key": KEY,
        "namespace": "ab" * 32, "route_id": "0" * 32, "donor_id": "d" * 32, "request_id": 5, "epoch": 2, "prompt_tokens": 1000,
        "local_tokens": 4, "offered": 960, "honoured": 928, "copied": 928, "confirmed": 896, "outcome": "materialized_exact",
        "reason": "ok", "tier": "host_pinned", "load_seconds": 0.25, "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    },
    "announcement": {
        "version": "1.0", "stable_routing_id": "worker-0", "dp_rank": 1, "generation": "g1", "model": "m", "namespace": NAMESPACE,
        "materialization": "exact", "slab_blocks": 100, "resident_blocks": 10, "connector_version": "semkv/1",
    },
    "opened": {
        "kind": "opened", "version": "1.0", "route_id": "0" * 32, "request_id": "q", "router": "router-0", "attempt": 0, "model": "m",
        "mode": "enforce", "opened_at": 1.5, "prompt_key": KEY, "input_tokens": 1000, "exact_device_tokens": 4, "exact_host_tokens": 2,
        "evidence_tokens": 960, "placed_tokens": 960, "hinted_tokens": 960, "proven_tokens": 900, "lookup": "hit",
        "lookup_seconds": 0.001, "decision_reason": "placed", "stable_routing_id": "worker-0", "dp_rank": 1,
        "worker_id": "12345678901234567890", "donor_id": "d" * 32, "donor_generation": "g1", "match_type": "exact_equivalent",
        "overlap": "full", "tier": "host_pinned", "provider": "fingerprint", "config_hash": "00ff",
        "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    },
    "observed": {
        "kind": "observed", "version": "1.0", "route_id": "0" * 32, "observed_at": 2.5, "end": "complete",
        "served_stable_routing_id": "worker-0", "served_dp_rank": 1, "served_worker_id": "12345678901234567890", "ttft_seconds": 0.5,
        "output_tokens": 9, "engine_cached_tokens": 900,
    },
    "delivery": {
        "version": "1.0", "stable_routing_id": "worker-0", "dp_rank": 1, "prompt_key": KEY,
        "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        "envelope": {
            "protocol_version": "0.1", "message_id": "m1",
            "actions": [{"action_id": "a1", "action_type": "semkv.donor", "action_version": "1.0", "payload": DONOR_HINT}],
        },
    },
    "donor": {
        "schema_version": 1, "event_id": 0, "worker_id": 7, "dp_rank": 1,
        "data": {
            "kind": "donor_registered", "donor_id": "d" * 32, "token_count": 96, "provider_generation": "g1", "location": LOCATION,
            "namespace": {
                "model": "m", "tokenizer": "t", "kv_layout": "l", "block_size": 32, "extra": {"semkv_namespace": "ab" * 32},
                "kv_dtype": "fp16",
            },
            "segments": [{"segment_id": 0, "token_range": [0, 96], "digest": 5, "provider_metadata": b"\x01\x02"}],
            "ttl": 10_800.0,
        },
    },
}  # fmt: skip


def codecs() -> dict[str, tuple[Any, Any, Any]]:
    """Name -> (type, encode, decode) of the release that is on the path."""
    from dynamo_semkv.contracts import codec
    from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
    from dynamo_semkv.contracts.donor_events import DonorEvent
    from dynamo_semkv.contracts.hints import HintDelivery
    from dynamo_semkv.contracts.report import MaterializationReport
    from dynamo_semkv.contracts.route_events import RouteEvent

    return {
        "report": (MaterializationReport, codec.encode_report, codec.decode_report),
        "announcement": (ReplicaAnnouncement, codec.encode_announcement, codec.decode_announcement),
        "opened": (RouteEvent, codec.encode_route_event, codec.decode_route_event),
        "observed": (RouteEvent, codec.encode_route_event, codec.decode_route_event),
        "delivery": (HintDelivery, codec.encode_hint_delivery, codec.decode_hint_delivery),
        "donor": (DonorEvent, lambda event: codec.encode_donor_event(event, codec.MSGPACK), _decode_donor),
        "donor_json": (DonorEvent, codec.encode_donor_event, codec.decode_donor_event),
    }


def _decode_donor(raw: bytes) -> Any:
    from dynamo_semkv.contracts import codec

    return codec.decode_donor_event(raw, codec.MSGPACK)


def made(name: str, **changes: Any) -> Any:
    import msgspec

    return msgspec.convert({**PLAIN[name], **changes}, codecs()[name][0])


def write() -> dict[str, str]:
    import msgspec

    out = {}
    for name, (kind, encode, _) in codecs().items():
        plain = PLAIN[name.removesuffix("_json")]
        out[name] = encode(msgspec.convert(plain, kind)).hex()
    return out


def read(messages: dict[str, str]) -> dict[str, Any]:
    """By the part of a name before `:`, so that one kind can be asked about several times."""
    import msgspec

    from dynamo_semkv.contracts.codec import UnsupportedVersion
    from dynamo_semkv.contracts.errors import ContractError

    out: dict[str, Any] = {}
    for name, raw in messages.items():
        try:
            out[name] = msgspec.to_builtins(codecs()[name.partition(":")[0]][2](bytes.fromhex(raw)))
        except ContractError as error:
            out[name] = {"refused": isinstance(error, UnsupportedVersion), "error": str(error)}
    return out


def numbered(number: int) -> dict[str, Any]:
    return {"route_id": f"{number:032x}", "prompt_key": number.to_bytes(16, "big")}


def connected(url: str, name: str, packs: bool) -> Any:
    from dynamo_semkv.bus.publisher import BusPublisher
    from dynamo_semkv.config.schema import BusConfig

    fields: dict[str, Any] = {"url": url, "stream_max_bytes": 16 * 2**20}
    if "pack_records" in BusConfig.__struct_fields__:
        fields["pack_records"] = packs
    publisher = BusPublisher(BusConfig(**fields), name)
    publisher.start()
    return publisher


def publish(publisher: Any, messages: list[tuple[str, bytes, str, str]]) -> None:
    end = time.monotonic() + 30.0
    for subject, payload, content_type, message_id in messages:
        assert publisher.publish(subject, payload, content_type=content_type, message_id=message_id)
    while publisher.stats().published < len(messages):
        assert time.monotonic() < end, publisher.stats()
        time.sleep(0.01)


def worker(url: str, numbers: range, packs: bool = False) -> None:
    from dynamo_semkv.contracts import codec, subjects
    from dynamo_semkv.contracts.identity import StableReplica, stable_worker_id

    name = f"worker-{numbers.start}"
    replica = StableReplica(name, 1)
    own = {"worker_id": stable_worker_id(name)}
    donor = {**PLAIN["donor"]["data"], "donor_id": name, "location": {**LOCATION, **own}}
    messages = [
        (
            subjects.announcements(replica),
            codec.encode_announcement(made("announcement", stable_routing_id=name)),
            codec.MSGPACK,
            f"{name}a",
        ),
        (
            subjects.donor_events(replica),
            codec.encode_donor_event(made("donor", **own, data=donor), codec.MSGPACK),
            codec.MSGPACK,
            f"{name}d",
        ),
    ]
    for number in numbers:
        report = made("report", stable_routing_id=name, report_id=f"r{number}", request_id=number, **numbered(number))
        messages.append((subjects.reports(replica), codec.encode_report(report), codec.MSGPACK, f"r{number}"))
    publisher = connected(url, name, packs)
    publish(publisher, messages)
    publisher.close(5.0)


async def router(url: str, numbers: range, served_by: str, packs: bool = False) -> None:
    from dynamo_semkv.bus.subscriber import BusSubscriber
    from dynamo_semkv.config.schema import BusConfig
    from dynamo_semkv.contracts import codec, subjects

    try:
        from dynamo_semkv.outcome.route_tracker import RouteTracker
    except ImportError:  # the release before has it under this name
        from dynamo_semkv.outcome.book import OutcomeBook as RouteTracker
    from dynamo_semkv.outcome.intake import Intake

    name = f"router-{numbers.start}"
    messages = []
    for number in numbers:
        own = numbered(number)
        opened = made("opened", router=name, stable_routing_id=served_by, **own)
        observed = made("observed", route_id=own["route_id"], served_stable_routing_id=served_by)
        for kind, event in (("opened", opened), ("observed", observed)):
            messages.append((subjects.routes(name), codec.encode_route_event(event), codec.MSGPACK, f"{number}.{kind}"))
    publisher = connected(url, name, packs)
    await asyncio.to_thread(publish, publisher, messages)
    closed: list[Any] = []
    # Minutes may pass on a busy machine between a worker's report and the router that opens its route.
    tracker = RouteTracker(3_600.0, closed.append, settle_seconds=0.0)
    announced: dict[str, str] = {}
    donors: set[str] = set()
    subscriber = BusSubscriber(BusConfig(url=url, stream_max_bytes=16 * 2**20), name)
    intake = Intake(
        subscriber,
        tracker,
        apply_donor_event=lambda event, *_: donors.add(event.data.donor_id),
        announce=lambda said: announced.__setitem__(said.stable_routing_id, said.connector_version),
    )
    await subscriber.start()
    await intake.start()
    while await asyncio.to_thread(sys.stdin.readline):
        said = {
            "live": intake.live,
            "closed": {
                int(route.opened.route_id, 16): [route.outcome.value, route.report.confirmed if route.report else None]
                for route in closed
            },
            "announced": sorted(announced),
            "donors": sorted(donors),
            "refused": {key: count for key, count in intake.counts.items() if not key.endswith(".messages")},
        }
        print(json.dumps(said), flush=True)
    await intake.close()
    await subscriber.close()
    await asyncio.to_thread(publisher.close, 5.0)


def main(place: str, verb: str, *arguments: str) -> None:
    sys.path.insert(0, place)
    import dynamo_semkv

    assert (dynamo_semkv.__file__ or "").startswith(place), dynamo_semkv.__file__
    if verb == "write":
        print(json.dumps(write()))
    elif verb == "read":
        print(json.dumps(read(json.load(sys.stdin))))
    elif verb == "worker":
        worker(arguments[0], as_range(arguments[1]), "packs" in arguments)
    elif verb == "router":
        asyncio.run(router(arguments[0], as_range(arguments[1]), arguments[2], "packs" in arguments))


def as_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
