"""Counterparts of TensorRT-LLM's unit tests of prefix reservations, under their names. We have no reservations
(test_dialects.py: how that is said); what they protect, an offer's source between promise and load, is here a lease,
and must hold just the same. The table is in README.md."""

from __future__ import annotations

from tests.worker_connector.scripted import SIZE, Request, ScriptedEngine, make
from worker_connector.link.channel import LoadDone

PROMPT = list(range(41))


def small() -> ScriptedEngine:
    """A slab of ten blocks: the ten of PROMPT, served once."""
    engine = make(slots=10)
    engine.serve(PROMPT)
    assert engine.leader.snapshot()["ledger"]["free"] == 0
    return engine


def offered(engine: ScriptedEngine) -> Request:
    request = engine.request(PROMPT)
    assert engine.ask(request) == 40
    return request


def replaced(engine: ScriptedEngine, seed: int) -> int:
    """Another prompt's ten blocks want the slots; returns how many of PROMPT's are left."""
    engine.serve(range(1000 * seed, 1000 * seed + 41))
    probe = engine.request(PROMPT)
    left = engine.ask(probe) // SIZE
    engine.leader.reset(probe)
    engine.leader.finished(probe)
    return left


def test_reservation_protects_source_without_transmission() -> None:
    engine = small()
    request = offered(engine)
    assert replaced(engine, 1) == 10
    assert engine.rank.counts["loaded_blocks"] == 0
    engine.leader.reset(request)  # given up: the source is anybody's again
    engine.leader.finished(request)
    assert engine.leader.snapshot()["leases"] == 0
    assert replaced(engine, 2) == 0


def test_overlapping_reservations_keep_independent_source_protection() -> None:
    engine = small()
    first, second = offered(engine), offered(engine)
    engine.leader.reset(first)
    engine.leader.finished(first)
    assert replaced(engine, 1) == 10
    engine.allocate(second, 0, 40, 41)
    engine.iterate((second, 1))  # checks the bytes
    assert engine.report_of(second).confirmed == 40
    assert replaced(engine, 2) == 0


def test_sync_load_retains_ownership_until_identity_completion() -> None:
    """The lease is held until the copy has ended and no longer: the forward pass reads pages, not the slab."""
    engine = small()
    request = offered(engine)
    engine.allocate(request, 0, 40, 41)
    engine.schedule(request, 1)
    metadata = engine.build()
    assert engine.leader.snapshot()["leases"] == 1
    engine.rank.start_load(metadata, None)
    assert engine.leader.snapshot()["leases"] == 0
    engine.check(request, 40)


def test_stale_completion_cannot_finish_a_replayed_allocation() -> None:
    """Answers name request and epoch; one that comes for an earlier allocation, twice, or for nobody changes
    nothing."""
    engine = small()
    request = offered(engine)
    engine.allocate(request, 0, 40, 41)
    engine.iterate((request, 1), forward=False)
    first = engine.metadata.loads[0].key
    engine.restart(request)
    assert engine.ask(request) == 40
    engine.allocate(request, 0, 40, 41)
    engine.schedule(request, 1)
    metadata = engine.build()
    life = engine.leader._life
    assert life is not None
    for key in (first, first, first._replace(request_id=10_000)):
        life.copied(LoadDone(0, engine.metadata.iteration, key, True))
    assert engine.leader.snapshot()["leases"] == 1
    engine.rank.start_load(metadata, None)
    engine.check(request, 40)
    engine.rank.forward_done(metadata, None)
    reports = [report for report in engine.sink.reports if report.request_id == request.request_id]
    assert [(report.epoch, report.confirmed) for report in reports] == [(0, 0), (1, 40)]
