"""What an engine's drainer may hand in without costing more than a bounded number of threads and log lines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker_connector.harness import wait_for
from worker_connector.donors import kv_event_registry as event_intake
from worker_connector.donors.kv_event_registry import MAX_PIPES, MAX_RANK, observe_kv_events
from worker_connector.donors.kv_event_socket import KvEventListener, event_socket_path


@pytest.fixture(autouse=True)
def engine(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(socket_folder))
    monkeypatch.setenv("DYN_STABLE_ROUTING_ID", "engine-z")
    monkeypatch.setattr(event_intake, "_hearers", set())
    event_intake.counts.clear()
    yield
    event_intake.close_pipes()


def event(rank: Any) -> dict[str, Any]:
    return {"event_id": 0, "attention_dp_rank": rank, "data": {}}


def test_ranks_cost_a_bounded_number_of_threads() -> None:
    before = threading.active_count()
    assert observe_kv_events([event(rank) for rank in range(MAX_PIPES + 10)]) == MAX_PIPES
    assert threading.active_count() - before <= MAX_PIPES
    assert event_intake.counts["too_many_ranks"] == 10
    assert observe_kv_events(event(0)) == 1


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1, 10**30, float("inf"), "1", True, [], 0.0])
def test_rank_that_is_none_is_dropped_and_counted(rank: Any) -> None:
    heard: list[Any] = []
    ear = KvEventListener(event_socket_path("engine-z", 0), heard.extend)
    ear.start()
    try:
        assert observe_kv_events([event(rank)]) == 0
        assert event_intake.counts["bad_rank"] == 1
        assert observe_kv_events([event(rank), event(None)]) == 1
        wait_for(lambda: heard == [event(None)])
    finally:
        ear.close()


def test_directory_of_somebody_else_costs_few_lines_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    event_socket_path("engine-z", 0).parent.chmod(0o755)
    with caplog.at_level(logging.DEBUG):
        for _ in range(100):
            assert observe_kv_events(event(0)) == 0
    assert event_intake.counts["no_pipe"] == 100
    assert len(caplog.records) == 7
    assert "nobody else can enter" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_no_thread_to_be_had_costs_those_events_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert observe_kv_events(event(0)) == 0
    assert event_intake.counts["no_pipe"] == 1
    assert observe_kv_events(event(0)) == 1


def test_fault_of_a_hearer_is_logged_at_growing_intervals(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def kv_events(self, events: Any) -> None:
            raise LookupError("a fault of ours")

    monkeypatch.setattr(event_intake, "_hearers", {Broken()})
    for _ in range(8):
        assert observe_kv_events(event(0)) == 0
    assert event_intake.counts["faults"] == 8
    assert len(caplog.records) == 4
