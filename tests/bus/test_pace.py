"""Pace: a message that is alone is not held back, and a burst is forgotten."""

from __future__ import annotations

import pytest

from dynamo_semkv.bus.pace import BUSY, GATHER_BUSY_SECONDS, GATHER_SECONDS, HALF_LIFE_SECONDS, Pace


def test_alone_is_short_many_is_long_and_quiet_is_short_again() -> None:
    pace = Pace()
    assert pace.gather_seconds(0.0) == GATHER_SECONDS
    pace.sent(int(BUSY) - 1, 100.0)
    assert not pace.busy(100.0)
    pace.sent(1, 100.0)
    assert pace.gather_seconds(100.0) == GATHER_BUSY_SECONDS
    assert not pace.busy(100.0 + 0.1 * HALF_LIFE_SECONDS)


@pytest.mark.parametrize(("rate", "busy"), [(10.0, False), (25.0, False), (31.0, True), (200.0, True)])
def test_a_steady_rate_is_busy_or_not_however_it_is_cut_into_sends(rate: float, busy: bool) -> None:
    for step in (0.005, 0.05):
        pace, now = Pace(), 0.0
        owed = 0.0
        while now < 20 * HALF_LIFE_SECONDS:
            now += step
            owed += rate * step
            if owed >= 1.0:
                pace.sent(int(owed), now)
                owed -= int(owed)
        assert pace.busy(now) is busy


def test_a_clock_that_stands_still_or_goes_back_does_no_harm() -> None:
    pace = Pace()
    pace.sent(100, 50.0)
    assert pace.busy(49.0)
