"""What is resident is said again before the bus forgets how it began: a late router, or a confused one, is complete
again."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_semkv.contracts.donor_events import DonorEvent, GenerationReset
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.testing import ManualClock
from tests.worker_connector.harness import Bench, engine, prompt, run, settings
from worker_connector.restatement import RESTATES_PER_MEMORY


def catalog_of(events: list[DonorEvent]) -> DonorCatalog:
    catalog = DonorCatalog([], clock=ManualClock())
    for event in events:
        catalog.apply(event)
    return catalog


def trusted(catalog: DonorCatalog, donor_ids: set[str]) -> set[str]:
    """Those that the catalog knows and gives credit."""
    return {d for d in donor_ids if (donor := catalog.get(d)) is not None and donor.creditable}


def test_a_router_that_starts_after_the_bus_forgot_learns_of_all_donors() -> None:
    clock = ManualClock()
    bench = Bench(settings(), clock=clock)
    with engine(bench) as running:
        for seed in range(3):
            run(running, prompt(100, seed))
        known = {
            event.data.donor_id for event in bench.sink.donor_events if not isinstance(event.data, GenerationReset)
        }
        assert len(known) == 3
        bench.leader.restate_if_due()
        forgotten = len(bench.sink.donor_events)
        clock.advance(bench.settings.bus.stream_max_age_seconds / RESTATES_PER_MEMORY)
        bench.leader.restate_if_due()
        kept = bench.sink.donor_events[forgotten:]
        assert isinstance(kept[0].data, GenerationReset)
        assert trusted(catalog_of(kept), known) == known
        assert trusted(catalog_of(bench.sink.donor_events), known) == known
        assert bench.sink.announcements[-1].generation == kept[0].data.generation
        bench.leader.restate_if_due()
        assert len(bench.sink.donor_events) == forgotten + len(kept), "said again before it was due"
        run(running, prompt(100, 0))
        assert bench.sink.reports[-1].local_tokens > 0
    bench.check_balance()


def test_a_forged_event_does_not_cost_trust_for_ever() -> None:
    clock = ManualClock()
    bench = Bench(settings(), clock=clock)
    with engine(bench) as running:
        run(running, prompt(100))
        said = bench.sink.donor_events
        known = {said[-1].data.donor_id}
        catalog = catalog_of([*said, msgspec.structs.replace(said[-1], event_id=2**40)])
        assert trusted(catalog, known) == set()
        clock.advance(bench.settings.bus.stream_max_age_seconds)
        bench.leader.restate_if_due()
        for event in bench.sink.donor_events[len(said) :]:
            catalog.apply(event)
        assert trusted(catalog, known) == known


def test_many_events_are_reason_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(settings(), clock=ManualClock())
    with engine(bench) as running:
        run(running, prompt(100))
        monkeypatch.setattr("worker_connector.restatement.RESTATE_EVENTS", 1)
        bench.leader.restate_if_due()
        assert bench.leader.counts["restated"] == 0
        run(running, [*prompt(100), *prompt(60, 9)])  # supersedes the first: one event more than there are donors
        bench.leader.restate_if_due()
        assert bench.leader.counts["restated"] == 1
