"""Random schedules of engine and connector. After every step: each page that attention reads holds exactly what a cold
prefill would have put there, nobody wrote a page that was not theirs to write, slots and leases balance, every report's
counts are in order; at the end every request has the cold answer, and nothing is held. Longer runs: `make
schedules`."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.worker_connector.schedules.mutants import MUTANTS, Mutant
from tests.worker_connector.schedules.schedule import random_tape, run_schedule
from tests.worker_connector.schedules.world import Broken
from worker_connector.errors import LoadFailed

SCHEDULES = 2000
MUTANT_SCHEDULES = 2000

seen: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Damage and late offers are logged as errors, and are what these schedules do all the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@hypothesis_settings(
    max_examples=SCHEDULES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # `replay --shorten` knows what makes a schedule short, and takes seconds
    database=None,
)
@given(st.binary(min_size=64, max_size=176))
def one_schedule(data: bytes) -> None:
    seen["schedules"] += 1
    note(f"python -m tests.worker_connector.schedules replay --shorten {data.hex()}")
    seen.update(run_schedule(data))


@pytest.mark.timeout(600)
def test_schedules() -> None:
    seen.clear()
    one_schedule()
    assert seen["schedules"] >= SCHEDULES
    # ... and they went where it matters.
    for what, times in WENT_THROUGH.items():
        assert seen[what] >= times, (what, dict(seen))


WENT_THROUGH = {
    "materialized_exact": SCHEDULES // 4,
    "local_exact": SCHEDULES // 4,
    "evicted": SCHEDULES,
    "vanished": SCHEDULES // 4,
    "saves_no_slot": SCHEDULES // 10,
    "saves_chain_evicted": SCHEDULES // 20,
    "damaged_blocks": SCHEDULES // 100,
    "loaded_blocks": SCHEDULES,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_connectors_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the number of schedules that are run by default, whatever the seed: nearly all within the first few."""
    mutant(monkeypatch)
    dice = random.Random(mutant.__name__)
    found = next((error for _ in range(MUTANT_SCHEDULES) if (error := _error_of(random_tape(dice))) is not None), None)
    assert found is not None, f"{mutant.__name__} was not found in {MUTANT_SCHEDULES} schedules"
    # ... and not because the broken code does not even run.
    assert not [word for word in ("result_errors", "a callback raised") if word in str(found)]


def _error_of(data: bytes) -> Exception | None:
    try:
        run_schedule(data)
    except (Broken, AssertionError, LoadFailed, RuntimeError) as error:
        return error
    return None
