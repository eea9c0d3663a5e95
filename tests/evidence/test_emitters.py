"""What an emitter may speak for, and which tenant a donor belongs to; reports about tenants have their tests here."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorSegment,
    PurgeAll,
    PurgeLocation,
    PurgeWorker,
    WireNamespace,
)
from dynamo_semkv.contracts.location import SharedLocation, Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import semblend_tenant_key, tenant_scope
from dynamo_semkv.evidence.emitters import partition_of
from dynamo_semkv.evidence.stream import Verdict
from dynamo_semkv.testing import EventTape
from tests.evidence.catalogs import NS, TEXT, catalog, creditable, feed, tape_of
from tests.evidence.documents import document, namespace


@pytest.mark.parametrize(
    "location", [WorkerLocation(2, 0, Tier.DEVICE), WorkerLocation(1, 1, Tier.DEVICE)], ids=["worker", "rank"]
)
def test_an_emitter_speaks_for_its_own_rank_only(location: WorkerLocation) -> None:
    target, _, _ = catalog()
    tape = tape_of("mine")
    tape.register("theirs", TEXT, NS, location=location)
    tape.relocate("mine", location)
    assert feed(target, tape)[-2:] == [Verdict.FOREIGN_LOCATION, Verdict.FOREIGN_LOCATION]
    assert creditable(target) == {"mine"}
    donor = target.get("mine")
    assert donor is not None
    assert donor.location == WorkerLocation(1, 0, Tier.HOST_PINNED)


def test_a_shared_store_may_be_spoken_for_by_anyone() -> None:
    target, _, _ = catalog()
    tape = tape_of()
    store = SharedLocation("mooncake", Tier.EXTERNAL, "bucket/1")
    tape.register("s", TEXT, NS, location=store)
    feed(target, tape)
    assert target.get("s") is not None


def test_nobody_evicts_replaces_or_moves_anothers_donor() -> None:
    target, _, _ = catalog()
    feed(target, tape_of("a"))
    thief = tape_of(worker_id=2)
    thief.register("a", document(2, 600), NS)
    thief.evict("a")
    thief.relocate("a", thief.here(Tier.DEVICE))
    assert feed(target, thief)[1:] == [Verdict.FOREIGN_DONOR] * 3
    donor = target.get("a")
    assert donor is not None
    assert donor.stream == (1, 0)


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        (PurgeAll(), {"b1"}),
        (PurgeWorker(worker_id=1), {"shared", "b1"}),
        (PurgeLocation(location=WorkerLocation(1, 0, Tier.DEVICE)), {"host", "shared", "b1"}),
        (PurgeLocation(location=SharedLocation("s3", Tier.EXTERNAL, "x")), {"host", "device", "b1"}),
        (PurgeLocation(location=WorkerLocation(2, 0, Tier.HOST_PINNED)), {"host", "device", "shared", "b1"}),
        (PurgeWorker(worker_id=2), {"host", "device", "shared", "b1"}),
    ],
)
def test_purge_scopes_reach_the_emitters_own_donors_only(scope: Any, left: set[str]) -> None:
    target, index, _ = catalog()
    feed(target, tape_of("b1", worker_id=2))
    tape = tape_of("host")
    tape.register("device", TEXT, NS, location=tape.here(Tier.DEVICE))
    tape.register("shared", TEXT, NS, location=SharedLocation("s3", Tier.EXTERNAL, "x"))
    tape.purge(scope)
    feed(target, tape)
    assert creditable(target) | creditable(target, 2) == left == index.creditable()
    target.sweep()
    assert set(index.donors) == left


def test_sglang_24568_equal_tokens_under_two_salts_are_two_donors_in_two_partitions() -> None:
    target, index, _ = catalog()
    tape = tape_of()
    tape.register("a", TEXT, namespace(tenant_scope("alice")))
    tape.register("b", TEXT, namespace(tenant_scope("bob")))
    feed(target, tape)
    assert index.donors["a"].namespace_digest_hex != index.donors["b"].namespace_digest_hex


def semblend(extra: dict[str, str], **fields: Any) -> WireNamespace:
    return WireNamespace(model="m", tokenizer="t", kv_layout="l", block_size=32, extra=extra, **fields)


def embedding(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_semblend_donors_are_kept_apart_and_give_no_fingerprints() -> None:
    target, index, _ = catalog()
    tape = EventTape(worker_id=0, generation=1_700_000_000_000)
    spaces = [
        semblend({"tenant_key": semblend_tenant_key("alice"), "cache_salt": "x"}),
        semblend({"tenant_key": semblend_tenant_key("bob"), "cache_salt": "x"}),
        semblend({"tenant_key": semblend_tenant_key(None)}),
        semblend({}),
        semblend({"tenant_key": ""}),
        semblend({}, lora=""),
        semblend({}, adapter="a1"),
        semblend({}, kv_dtype="fp8"),
        semblend({}, model_revision="2"),
        semblend({}, rope_config={"rope_theta": 1e6}),
        semblend({}, tensor_parallel={"tp_size": 2}),
    ]
    for n, space in enumerate(spaces):
        vector = embedding(math.nan, math.inf) if n % 2 else embedding(0.1, 0.2, 0.3)
        segment = DonorSegment(segment_id=0, token_range=(0, 64), digest=1, provider_metadata=vector)
        tape.register_wire(f"sb{n}", 64, space, [segment])
    assert set(feed(target, tape)) == {Verdict.APPLIED}
    partitions = [index.donors[f"sb{n}"].namespace_digest_hex for n in range(len(spaces))]
    assert len(set(partitions)) == len(partitions), "absent, empty and different tenants are all different"
    assert all(p.startswith("wire:") for p in partitions), "no request's digest can equal it"
    assert all(donor.sketch is None for donor in index.donors.values())


def test_the_order_of_a_maps_keys_does_not_part_donors() -> None:
    one, other = semblend({"a": "1", "b": "2"}), semblend({"b": "2", "a": "1"})
    assert partition_of(one) == partition_of(other)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"x": inner}
    return inner


@pytest.mark.parametrize("rope", [nested(100_000), {"x": object()}], ids=["deep", "no JSON"])
def test_a_namespace_that_cannot_be_encoded_is_malformed(rope: dict[str, Any]) -> None:
    assert partition_of(semblend({}, rope_config=rope)) is None


def test_a_sketch_does_not_count_without_our_namespace_digest() -> None:
    """An event that lost the digest on its way (a hop that drops unknown fields) is credited to no tenant at all."""
    target, index, _ = catalog()
    tape = tape_of()
    whole = tape.register("a", TEXT, NS).data
    tape.register_wire("b", 600, semblend({}), whole.segments)  # type: ignore[union-attr]
    feed(target, tape)
    assert index.donors["b"].sketch is None
    assert index.donors["b"].namespace_digest_hex != NS.digest().hex()


@pytest.mark.parametrize("digest", ["", "ab", "A" * 64, "g" * 64, "0" * 63 + "\n", "wire:" + "0" * 59])
def test_a_malformed_digest_is_refused(digest: str) -> None:
    target, _, _ = catalog()
    tape = tape_of()
    segment = DonorSegment(segment_id=0, token_range=(0, 64), digest=1)
    tape.register_wire("a", 64, semblend({NAMESPACE_DIGEST_EXTRA: digest}), [segment])
    assert feed(target, tape)[-1] is Verdict.MALFORMED_NAMESPACE
    assert len(target) == 0


@pytest.mark.parametrize("block_size", [0, -32])
def test_a_block_size_that_cannot_be_is_refused(block_size: int) -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    segment = DonorSegment(segment_id=0, token_range=(0, 64), digest=1)
    space = WireNamespace(model="m", tokenizer="t", kv_layout="l", block_size=block_size)
    tape.register_wire("b", 64, space, [segment])
    assert feed(target, tape)[-1] is Verdict.MALFORMED_NAMESPACE


@pytest.mark.parametrize("damage", [lambda raw: raw[:-3], lambda raw: raw[:12] + b"\xff" * 6 + raw[18:]])
def test_a_damaged_sketch_drops_the_donor_and_keeps_the_stream(damage: Any) -> None:
    target, _, _ = catalog()
    tape = tape_of("good")
    good = tape.events[-1].data.segments[0].provider_metadata  # type: ignore[union-attr]
    tape.register("bad", TEXT, NS, sketch=damage(good))
    tape.register("other", document(3, 700), NS, sketch=good)  # type: ignore[arg-type]
    tape.register("next", TEXT, NS)
    assert feed(target, tape)[-3:] == [Verdict.BAD_SKETCH, Verdict.BAD_SKETCH, Verdict.APPLIED]
    assert creditable(target) == {"good", "next"}


def test_an_emitter_that_is_always_wrong_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nor can a donor's name begin a line of its own in it."""
    target, _, _ = catalog()
    tape = tape_of("good")
    good = tape.events[-1].data.segments[0].provider_metadata  # type: ignore[union-attr]
    for number in range(100):
        tape.register(f"bad\n{number}", TEXT, NS, sketch=good[:-3])  # type: ignore[arg-type,index]
    assert feed(target, tape)[-100:] == [Verdict.BAD_SKETCH] * 100
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" so far")[0].rpartition("(")[2] for line in lines] == ["1", "2", "4", "8", "16", "32", "64"]
    assert not any("\n" in line for line in lines)
