"""The page is asked a bounded number of times a second, and its files and probes as often as one likes."""

from __future__ import annotations

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.dashboard.rate_limit import RateLimit
from dynamo_semkv.testing import ManualClock
from tests.dashboard.serving import served


@given(st.lists(st.floats(0, 3), max_size=40), st.integers(1, 5), st.floats(0.1, 10))
def test_never_more_than_the_burst_and_the_rate(pauses: list[float], burst: int, per_second: float) -> None:
    clock = ManualClock()
    began, rate, taken = clock(), RateLimit(per_second, burst, clock), 0
    for pause in pauses:
        clock.advance(pause)
        taken += rate.take()
    assert taken <= burst + (clock() - began) * per_second + 1e-6
    assert taken + rate.refused == len(pauses)


def test_it_fills_again_and_a_clock_that_goes_back_gives_nothing() -> None:
    clock = ManualClock()
    rate = RateLimit(2.0, 3, clock)
    assert [rate.take() for _ in range(4)] == [True, True, True, False]
    clock.advance(0.5)
    assert [rate.take(), rate.take()] == [True, False]
    clock.advance(-100.0)
    assert not rate.take()
    clock.advance(100.0)
    assert not rate.take()
    clock.advance(100.0)
    assert [rate.take() for _ in range(4)] == [True, True, True, False]


async def test_questions_beyond_the_rate_are_told_so() -> None:
    async with served() as site, aiohttp.ClientSession() as client:
        site.server._rate = RateLimit(1e-6, 2)
        paths = (
            "/api/snapshot",
            "/metrics",
            "/api/snapshot",
            "/api/requests/x",
            "/metrics",
            "/",
            "/healthz",
            "/readyz",
        )
        statuses = []
        for path in paths:
            async with client.get(site.server.url + path) as answer:
                statuses.append(answer.status)
                if answer.status == 429:
                    assert answer.headers["Retry-After"] == "1"
                    assert "a second" in (await answer.json())["error"]
        assert statuses[:6] == [200, 200, 429, 429, 429, 200]
        assert 429 not in statuses[6:]
        assert site.snapshots == 1
