"""What time it is for the broker, whose clock is not ours."""

from __future__ import annotations

from dynamo_semkv.outcome.bus_clock import WINDOW_SECONDS, BusClock
from tests.outcome.build import ManualClock


def test_before_any_message_nothing_is_old() -> None:
    assert BusClock(ManualClock()).now() < 0


def test_messages_of_the_past_are_as_old_as_the_newest_of_them_says() -> None:
    ours = ManualClock()
    clock = BusClock(ours)
    for stored_at in (1_000.0, 5_000.0, 9_000.0, 2_000.0):
        clock.message_arrived(stored_at)
    assert clock.now() == 9_000.0
    ours.advance(60.0)
    assert clock.now() == 9_060.0, "time goes on without messages"


def test_a_brokers_clock_that_was_set_back_is_followed() -> None:
    ours = ManualClock()
    clock = BusClock(ours)
    clock.message_arrived(1e6)
    for _ in range(3):
        ours.advance(WINDOW_SECONDS + 1)
        clock.message_arrived(ours() + 50.0)
    assert clock.now() == ours() + 50.0
