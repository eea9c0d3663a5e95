"""Waiting on conditions with a bounded deadline, and a settings object that points at a test's broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from dynamo_semkv.config.schema import BusConfig

DEADLINE_SECONDS = 30.0


def wait_for(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"not reached in {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.005)


async def until(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"not reached in {DEADLINE_SECONDS:.0f} s: {what}"
        await asyncio.sleep(0.005)


def settings(url: str, **changes: Any) -> BusConfig:
    return BusConfig(**{"url": url, "stream_max_bytes": 16 * 2**20, **changes})
