from __future__ import annotations

from tests.bus.conftest import nats_server

__all__ = ["nats_server"]
