from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from tests.bus.waiting import settings


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    """A running broker of this test's own; restarts use its port and its store."""
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def absent_server(nats_server: EmbeddedNats) -> EmbeddedNats:
    """A broker whose port is known and that is not there (until the test starts it)."""
    nats_server.kill()
    return nats_server


@pytest.fixture
def publisher(nats_server: EmbeddedNats) -> Iterator[Callable[..., BusPublisher]]:
    """Makes publishers of this test's broker, started; changes are of their settings."""
    made: list[BusPublisher] = []

    def make(on_loss: Callable[[str], None] | None = None, **changes: Any) -> BusPublisher:
        new = BusPublisher(settings(nats_server.url, **changes), "test", on_loss=on_loss)
        new.start()
        made.append(new)
        return new

    yield make
    for one in made:
        one.close(timeout=0.0)
