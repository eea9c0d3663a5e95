"""The catalog as a set of donors: registration, eviction, moving, purges, bounds."""

from __future__ import annotations

import gc

import pytest

from dynamo_semkv.contracts import codec
from dynamo_semkv.contracts.donor_events import (
    PurgeAll,
)
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.stream import Verdict
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.catalogs import NS, TEXT, Index, catalog, creditable, feed, tape_of
from tests.evidence.documents import document, namespace


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


def test_llm_d_kv_cache_680_donors_are_a_set() -> None:
    target, index, _ = catalog()
    tape = tape_of("a", "a")
    feed(target, tape)
    assert len(target) == 1
    target.apply(tape.evict("a"))
    assert len(target) == 0
    assert index.donors == {}


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


def test_the_garbage_collector_does_not_walk_donors() -> None:
    """A full collection over a hundred thousand donors of four objects each would stop the event loop for a quarter of
    a second."""
    provider = FingerprintProvider()
    target = DonorCatalog([provider], clock=ManualClock())
    tape = EventTape()
    feed(target, [tape.reset(), *(tape.register(f"d{n}", document(n, 600), NS) for n in range(50))])
    tape.events.clear()
    gc.collect()
    before = len(gc.get_objects())
    raws = [codec.encode_donor_event(tape.register(f"e{n}", document(n, 600), NS), codec.MSGPACK) for n in range(500)]
    tape.events.clear()
    for raw in raws:
        target.apply(codec.decode_donor_event(raw, codec.MSGPACK))
    gc.collect()
    assert len(provider) == 550
    assert len(gc.get_objects()) - before < 100
