"""Donor lifecycle: each public report about event order, identity or tenants has its test here, named after it."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorEvent,
    DonorSegment,
    PurgeAll,
    PurgeLocation,
    PurgeWorker,
    WireNamespace,
)
from dynamo_semkv.contracts.location import SharedLocation, Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import semblend_tenant_key, tenant_scope
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.stream import RETIRED_KEPT, Verdict
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.documents import document, namespace

TEXT = document(1, 600)
NS = namespace()


class Index:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.donors: dict[str, CatalogDonor] = {}
        self.told: list[tuple[str, str]] = []

    def donor_added(self, donor: CatalogDonor) -> None:
        self.told.append(("added", donor.donor_id))
        self.donors[donor.donor_id] = donor

    def donor_removed(self, donor_id: str) -> None:
        self.told.append(("removed", donor_id))
        del self.donors[donor_id]

    def creditable(self) -> set[str]:
        return {donor_id for donor_id, donor in self.donors.items() if donor.creditable}


def catalog(*listeners: Any, **limits: Any) -> tuple[DonorCatalog, Index, ManualClock]:
    index, clock = Index(), ManualClock()
    return DonorCatalog([index, *listeners], clock=clock, **limits), index, clock


def feed(target: DonorCatalog, events: Any) -> list[Verdict]:
    return [target.apply(event) for event in events]


def tape_of(*donors: str, worker_id: int = 1, dp_rank: int = 0, generation: int | str = "g1") -> EventTape:
    tape = EventTape(worker_id, dp_rank, generation)
    tape.reset()
    for donor in donors:
        tape.register(donor, TEXT, NS)
    return tape


def creditable(target: DonorCatalog, worker_id: int = 1, dp_rank: int = 0) -> set[str]:
    return {d.donor_id for d in target.donors_of(worker_id, dp_rank) if d.creditable}


def test_a_registered_donor_is_known_with_all_that_a_match_needs() -> None:
    target, index, _ = catalog()
    assert feed(target, tape_of("a")) == [Verdict.APPLIED, Verdict.APPLIED]
    donor = target.get("a")
    assert donor is not None
    assert donor == index.donors["a"]
    assert (donor.generation, donor.stream, donor.token_count) == ("g1", (1, 0), 600)
    assert donor.location == WorkerLocation(1, 0, Tier.HOST_PINNED)
    assert donor.namespace_digest_hex == NS.digest().hex()
    assert donor.sketch is not None


def test_kthena_1428_restarted_worker_with_the_same_name_is_not_warm() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    feed(target, tape)
    late = tape.register("late", TEXT, NS)
    restarted = tape.restart("g2").register("c", TEXT, NS)
    assert feed(target, [tape.events[-2], restarted]) == [Verdict.APPLIED, Verdict.APPLIED]
    assert creditable(target) == {"c"}
    assert target.apply(late) is Verdict.STALE_GENERATION
    assert creditable(target) == {"c"} == index.creditable()
    assert target.get("a") is None


@pytest.mark.parametrize("announce", [True, False])
def test_a_restart_is_recognised_with_and_without_a_reset(announce: bool) -> None:
    """SemBlend's emitter starts again at 0 with wall-clock milliseconds as generation, and sends no reset."""
    target, _, _ = catalog()
    feed(target, tape_of("a", generation=1_700_000_000_000))
    tape = EventTape().restart(1_700_000_099_999, announce=announce)
    tape.register("b", TEXT, NS)
    feed(target, tape)
    assert creditable(target) == {"b"}


def test_kthena_1550_restart_of_the_router_alone_loses_nothing() -> None:
    """A new catalog replays the same tape and arrives at the same donors."""
    tape = tape_of("a", "b", "c")
    tape.evict("b")
    first, second = catalog()[0], catalog()[0]
    feed(first, tape)
    feed(second, tape)
    assert creditable(first) == creditable(second) == {"a", "c"}


def test_llm_d_router_1737_a_lost_event_quarantines_until_a_reset() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    lost = tape.evict("a")
    after = tape.register("c", TEXT, NS)
    feed(target, [event for event in tape if event not in (lost, after)])
    assert target.apply(after) is Verdict.HELD
    assert creditable(target) == set() == index.creditable()
    assert target.counts["held"] == 1
    assert target.snapshot()["streams"][0]["quarantined"] is True
    feed(target, [tape.reset("g2"), tape.register("d", TEXT, NS)])
    assert creditable(target) == {"d"}


def test_llm_d_router_1737_the_missing_event_releases_the_quarantine() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    lost = tape.evict("a")
    after = tape.register("c", TEXT, NS)
    feed(target, [event for event in tape if event is not lost])
    assert creditable(target) == set()
    assert target.apply(lost) is Verdict.APPLIED
    assert creditable(target) == {"b", "c"} == index.creditable()
    assert target.apply(after) is Verdict.DUPLICATE


def test_llm_d_router_1737_a_consumer_that_joins_late_trusts_nothing_before_a_reset() -> None:
    target, _, _ = catalog()
    tape = tape_of("a", "b", "c")
    assert feed(target, tape.events[2:]) == [Verdict.HELD, Verdict.HELD]
    assert creditable(target) == set()
    feed(target, [tape.reset("g1"), tape.register("d", TEXT, NS)])
    assert creditable(target) == {"d"}


def test_a_gap_too_wide_to_hold_waits_for_a_reset() -> None:
    target, _, _ = catalog(max_held_per_stream=3)
    tape = tape_of("a")
    lost = tape.evict("nobody")
    for n in range(5):
        tape.register(f"n{n}", TEXT, NS)
    verdicts = feed(target, [event for event in tape if event is not lost])
    assert verdicts[-2:] == [Verdict.LOST, Verdict.LOST]
    target.apply(lost)
    assert creditable(target) == set(), "the held events are gone, so the gap can no longer be filled"
    assert target.snapshot()["held_events"] == 0
    target.apply(tape.reset("g1"))
    target.apply(tape.register("z", TEXT, NS))
    assert creditable(target) == {"z"}


def test_held_events_are_bounded_over_all_streams() -> None:
    target, _, _ = catalog(max_held=10)
    for worker in range(20):
        tape = EventTape(worker)
        tape.skip(5)
        tape.register(f"d{worker}", TEXT, NS)
        feed(target, tape)
    assert target.snapshot()["held_events"] == 10
    assert target.counts["lost"] == 10


def test_llm_d_kv_cache_680_donors_are_a_set() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "a")
    feed(target, tape)
    assert len(target) == 1
    target.apply(tape.evict("a"))
    assert len(target) == 0
    assert index.donors == {}


def test_a_replayed_tape_changes_nothing() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "b")
    feed(target, tape)
    told = list(index.told)
    assert set(feed(target, tape)) == {Verdict.DUPLICATE}
    assert index.told == told


def test_tokenspeed_166_a_reset_repeated_in_the_stream_is_idempotent_and_visible() -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    feed(target, tape)
    feed(target, [tape.reset("g1") for _ in range(5)])
    assert creditable(target) == set()
    assert target.counts["applied"] == 7
    target.apply(tape.register("b", TEXT, NS))
    assert creditable(target) == {"b"}


def test_etcd_12291_generations_have_no_order_but_the_streams() -> None:
    """A generation made from a wall clock may go backwards; the clock of the consumer does not matter either."""
    target, _, clock = catalog()
    tape = tape_of("a", generation=1_700_000_000_000)
    feed(target, tape)
    clock.advance(3_600)
    assert creditable(target) == {"a"}
    clock.advance(-7_200)
    feed(target, [tape.restart(5).events[-1], tape.register("b", TEXT, NS)])
    assert creditable(target) == {"b"}


def test_integer_and_text_generations_are_one() -> None:
    target, _, _ = catalog()
    tape = tape_of("a", generation=7)
    feed(target, tape)
    tape.generation = "7"
    assert target.apply(tape.evict("a")) is Verdict.APPLIED
    assert len(target) == 0


def test_retired_generations_are_remembered_within_bounds() -> None:
    target, _, _ = catalog()
    tape = EventTape()
    for n in range(RETIRED_KEPT + 20):
        tape.restart(f"g{n}").register(f"d{n}", TEXT, NS)
    feed(target, tape)
    recent = tape.events[-4]
    assert target.apply(recent) is Verdict.STALE_GENERATION
    assert creditable(target) == {f"d{RETIRED_KEPT + 19}"}


def test_llm_d_kv_cache_357_a_rank_is_a_replica_of_its_own() -> None:
    target, _, _ = catalog()
    feed(target, tape_of("a", dp_rank=1))
    assert creditable(target, dp_rank=1) == {"a"}
    assert creditable(target, dp_rank=0) == set()
    assert target.purge_replica(1, 0) == 0
    assert creditable(target, dp_rank=1) == {"a"}


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


def test_a_purge_in_the_middle_does_not_end_the_generation() -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    tape.purge(PurgeAll())
    tape.register("b", TEXT, NS)
    tape.register("a", TEXT, NS)
    feed(target, tape)
    target.sweep()
    assert creditable(target) == {"a", "b"}


def test_relocation_keeps_the_donor_and_moves_its_credit() -> None:
    target, index, _ = catalog()
    tape = tape_of()
    tape.register("a", TEXT, NS, location=tape.here(Tier.DEVICE))
    tape.relocate("a", tape.here(Tier.DISK))
    feed(target, tape)
    donor = index.donors["a"]
    assert donor.location == WorkerLocation(1, 0, Tier.DISK)
    assert donor.sketch is not None


def test_registering_again_moves_too() -> None:
    """The draft has no relocation: the same id is registered with its new location."""
    target, index, _ = catalog()
    tape = tape_of("a")
    tape.register("a", TEXT, NS, location=tape.here(Tier.DISK))
    feed(target, tape)
    assert index.donors["a"].location == WorkerLocation(1, 0, Tier.DISK)
    assert len(target) == 1


def test_unknown_donors_are_counted_and_keep_the_stream_in_order() -> None:
    target, _, _ = catalog()
    tape = tape_of()
    tape.evict("never")
    tape.relocate("never", tape.here(Tier.DISK))
    tape.register("a", TEXT, NS)
    assert feed(target, tape)[1:] == [Verdict.UNKNOWN_DONOR, Verdict.UNKNOWN_DONOR, Verdict.APPLIED]
    assert creditable(target) == {"a"}


def test_partial_eviction_leaves_evidence_for_what_is_left() -> None:
    target, index, _ = catalog()
    tape = tape_of()
    tape.register("a", TEXT, NS, cuts=(128, 384))
    tape.evict("a", [1])
    feed(target, tape)
    donor = index.donors["a"]
    assert donor.segments == ((0, 0, 128), (2, 384, 600))
    assert donor.sketch is not None
    positions = donor.sketch.positions
    assert not ((positions > 120) & (positions < 384)).any()
    assert (positions >= 384).any()
    assert max(ordinal for ordinal, _ in donor.sketch.checkpoints) == 3
    target.apply(tape.evict("a", ["nonsense"]))
    assert target.counts["unknown_segment"] == 1
    target.apply(tape.evict("a", [0, 2]))
    assert target.get("a") is None


def test_registration_of_a_part_covers_only_the_part() -> None:
    """Segments with a hole: the sketch describes the whole donor, the donor is only what the segments say."""
    target, index, _ = catalog()
    tape = tape_of()
    full = tape.register("a", TEXT, NS, cuts=(128, 384)).data
    tape.register_wire("b", 600, full.namespace, [full.segments[0], full.segments[2]])  # type: ignore[union-attr]
    feed(target, tape)
    part = index.donors["b"].sketch
    assert part is not None
    assert not ((part.positions > 120) & (part.positions < 384)).any()


def test_a_worker_that_leaves_takes_its_donors_and_late_events_do_not_bring_them_back() -> None:
    target, index, _ = catalog()
    tape = tape_of("a")
    feed(target, tape)
    assert target.purge_replica(1, 0) == 1
    assert creditable(target) == set()
    assert target.apply(tape.register("late", TEXT, NS)) is Verdict.APPLIED
    assert target.apply(tape.reset("g1")) is Verdict.APPLIED
    assert target.apply(tape.register("later", TEXT, NS)) is Verdict.APPLIED
    assert creditable(target) == set() == index.creditable()
    feed(target, tape.restart("g2").events[-1:])
    target.apply(tape.register("b", TEXT, NS))
    assert creditable(target) == {"b"}


def test_a_worker_that_was_only_out_of_sight_gets_its_credit_back_by_generation() -> None:
    target, _, _ = catalog()
    tape = tape_of("a", "b")
    feed(target, tape)
    target.purge_replica(1, 0)
    target.apply(tape.evict("b"))
    assert target.readmit_replica(1, 0, "another") is False
    assert creditable(target) == set()
    assert target.readmit_replica(1, 0, "g1") is True
    assert creditable(target) == {"a"}
    assert target.readmit_replica(9, 9, "g1") is False


def test_readmission_does_not_lift_a_quarantine() -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    tape.skip()
    tape.register("b", TEXT, NS)
    feed(target, tape)
    target.purge_replica(1, 0)
    target.readmit_replica(1, 0, "g1")
    assert creditable(target) == set()


def test_an_absent_worker_is_forgotten_after_a_while_and_stays_dead() -> None:
    target, index, clock = catalog(absent_seconds=60)
    tape = tape_of("a", "b")
    feed(target, tape)
    target.purge_replica(1, 0)
    clock.advance(59)
    assert target.forget_absent() == 0
    clock.advance(1)
    assert target.forget_absent() == 1
    assert target.sweep() == 2
    assert len(target) == 0
    assert index.donors == {}
    assert target.apply(tape.register("late", TEXT, NS)) is Verdict.STALE_GENERATION
    assert target.readmit_replica(1, 0, "g1") is False


def test_a_consumer_that_knows_of_a_loss_can_quarantine() -> None:
    target, _, _ = catalog()
    tape = tape_of("a")
    feed(target, tape)
    target.quarantine(1, 0)
    target.quarantine(5, 5)
    assert creditable(target) == set()
    assert target.counts["quarantined"] == 1
    target.apply(tape.reset("g1"))
    target.apply(tape.register("b", TEXT, NS))
    assert creditable(target) == {"b"}


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


def test_full_catalog_evicts_the_oldest_unused_of_the_largest_namespace() -> None:
    target, index, _ = catalog(max_donors=4)
    tape = tape_of()
    quiet, noisy = namespace("q"), namespace("n")
    tape.register("quiet", TEXT, quiet)
    for n in range(3):
        tape.register(f"n{n}", TEXT, noisy)
    feed(target, tape)
    target.touch("n0")
    target.apply(tape.register("n3", TEXT, noisy))
    assert set(index.donors) == {"quiet", "n0", "n2", "n3"}
    target.apply(tape.register("n4", TEXT, noisy))
    assert set(index.donors) == {"quiet", "n0", "n3", "n4"}
    assert target.counts["evicted_full"] == 2
    assert target.apply(tape.evict("n1")) is Verdict.UNKNOWN_DONOR


def test_a_namespace_has_a_share_of_its_own() -> None:
    target, index, _ = catalog(max_donors_per_namespace=2)
    tape = tape_of()
    for n in range(5):
        tape.register(f"n{n}", TEXT, namespace("n"))
    tape.register("q", TEXT, namespace("q"))
    feed(target, tape)
    assert set(index.donors) == {"n3", "n4", "q"}


def test_memory_is_bounded_in_bytes_as_well_as_in_donors() -> None:
    target, index, _ = catalog(max_donors=1_000, max_bytes=20_000)
    tape = tape_of()
    for n in range(12):
        tape.register(f"d{n}", document(n, 16_000), NS)
    feed(target, tape)
    assert 0 < target.snapshot()["sketch_bytes"] <= 20_000
    assert 2 <= len(index.donors) <= 5
    assert "d11" in index.donors


def test_streams_are_bounded_and_silent_ones_make_room() -> None:
    target, _, _ = catalog(max_streams=3)
    for worker in range(3):
        feed(target, tape_of(*([f"d{worker}"] if worker else []), worker_id=worker))
    assert feed(target, tape_of("d3", worker_id=3)) == [Verdict.APPLIED, Verdict.APPLIED], "0 had no donors"
    assert feed(target, tape_of("d4", worker_id=4)) == [Verdict.TOO_MANY_STREAMS] * 2
    assert creditable(target, 1) == {"d1"}


def test_a_reset_of_a_large_stream_costs_one_step_and_is_swept_in_small_ones() -> None:
    target, index, _ = catalog()
    feed(target, tape_of(*[f"d{n}" for n in range(200)]))
    target.apply(EventTape().restart("g2").events[0])
    assert index.creditable() == set(), "no credit from the moment of the reset"
    assert len(index.donors) > 150, "and no stall either"
    while target.sweep(64):
        pass
    assert index.donors == {}
    assert len(target) == 0


def test_a_donor_registered_again_after_a_reset_survives_the_sweep() -> None:
    target, index, _ = catalog()
    feed(target, tape_of(*[f"d{n}" for n in range(100)]))
    tape = EventTape().restart("g2")
    tape.register("d99", TEXT, NS)
    feed(target, tape)
    while target.sweep(64):
        pass
    assert set(index.donors) == {"d99"}
    assert creditable(target) == {"d99"}


def test_a_failing_listener_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def donor_added(self, donor: CatalogDonor) -> None:
            raise RuntimeError("no room")

        def donor_removed(self, donor_id: str) -> None:
            raise RuntimeError("no room")

    index, clock = Index(), ManualClock()
    target = DonorCatalog([Broken(), index], clock=clock)
    feed(target, tape_of("a"))
    assert set(index.donors) == {"a"}
    assert target.counts["listener_error"] == 1
    assert "listener failed" in caplog.text


def test_snapshot_is_plain_and_bounded() -> None:
    import json

    target, _, _ = catalog()
    for worker in range(300):
        feed(target, tape_of(worker_id=2**63 + worker))
    plain = json.loads(json.dumps(target.snapshot()))
    assert len(plain["streams"]) <= 256
    assert plain["streams"][0]["worker_id"] == str(2**63)


def test_event_ids_at_the_end_of_u64_do_not_overflow() -> None:
    target, _, _ = catalog()
    first = EventTape().reset()
    last = DonorEvent(schema_version=1, event_id=2**64 - 1, worker_id=1, dp_rank=0, data=first.data)
    assert target.apply(last) is Verdict.APPLIED
