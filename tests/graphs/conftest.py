"""One graph of real processes a module, on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.traffic import PATIENT

ROUTE_SECONDS = 25.0
"""How long a route waits for its report here: longer than an outage of the broker takes on a busy machine. Clients of a
broker that was away come back each in its own time, within some seconds; routes that wait less than that may close
without a report on one router and with it on another."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalGraph]:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        routers=2,
        blocks_per_rank=160,
        overrides={
            **LOW_GATE,
            **PATIENT,
            "outcome": {"report_ttl_seconds": ROUTE_SECONDS},
            "connector": {"announce_interval_seconds": 1.0},
        },
    )
    with LocalGraph(settings, run_dir=tmp_path_factory.mktemp("graph"), model_dir=model_dir) as started:
        yield started
