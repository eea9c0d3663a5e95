from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_semkv.bus.server import EmbeddedNats


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
