"""The background thread: jobs in order and within a bound, beats, and what is due."""

from __future__ import annotations

import math
import threading
import time

from tests.worker_connector.harness import wait_for
from worker_connector.background import Background


def test_jobs_run_in_order_and_a_failing_one_is_counted() -> None:
    done: list[int] = []
    background = Background("test", 100, 3600.0, lambda: None)
    background.start()
    background.submit(lambda: done.append(1))
    background.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    background.submit(lambda: done.append(2))
    assert background.drain(10)
    assert (done, background.failed) == ([1, 2], 1)
    background.close()
    assert not background.submit(lambda: done.append(3))


def test_jobs_beyond_the_capacity_are_refused_and_counted() -> None:
    gate = threading.Event()
    background = Background("test", 2, 3600.0, lambda: None)
    background.start()
    background.submit(lambda: (gate.wait(10), None)[1])
    wait_for(lambda: not background._jobs)
    assert [background.submit(lambda: None) for _ in range(4)] == [True, True, False, False]
    assert background.refused == 2
    gate.set()
    background.close()


def test_close_runs_what_waits() -> None:
    done: list[int] = []
    background = Background("test", 100, 3600.0, lambda: None)
    for number in range(20):
        background.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    background.start()
    background.close()
    assert done == list(range(20))


def test_steady_work_does_not_silence_the_beat() -> None:
    beats: list[int] = []
    background = Background("test", 10_000, 0.01, lambda: beats.append(1))
    stop = threading.Event()

    def again() -> None:
        if not stop.is_set():
            background.submit(again)

    background.submit(again)
    background.start()
    wait_for(lambda: len(beats) >= 3)
    stop.set()
    background.close()


def test_what_is_due_is_done_without_a_job_or_a_beat() -> None:
    """Also what a job made due, and where it failed: it is not tried for ever."""
    at, done = [math.inf], []

    def job() -> None:
        at[0] = time.monotonic() + 0.01

    def on_due() -> None:
        at[0] = math.inf
        done.append(1)
        raise ValueError("scripted")

    background = Background("test", 100, 3600.0, lambda: None, lambda: at[0], on_due)
    background.start()
    for times in (1, 2):
        background.submit(job)
        wait_for(lambda times=times: background.failed == times)  # type: ignore[misc]
    background.close()
    assert len(done) == 2
