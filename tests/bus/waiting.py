"""Waiting on conditions with a bounded deadline, settings that point at a test's broker, and what a broker keeps."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import nats
from nats.js.api import RawStreamMsg

from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.codec import decode_pack
from dynamo_semkv.contracts.pack import PACK

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


async def kept(server: EmbeddedNats, *streams: str) -> list[RawStreamMsg]:
    """Every message that the broker keeps, as it is."""
    client = await nats.connect(server.url)
    js = client.jetstream()
    found = []
    for stream in streams or STREAMS:
        state = (await js.stream_info(stream)).state
        found += [await js.get_msg(stream, n) for n in range(max(state.first_seq, 1), state.last_seq + 1)]
    await client.close()
    return found


def records(message: RawStreamMsg) -> list[bytes]:
    """Of a pack, or the one that it is."""
    payload = message.data or b""
    packed = (message.headers or {}).get("content-type") == PACK
    return list(decode_pack(payload).records) if packed else [payload]


async def stored(server: EmbeddedNats, *streams: str) -> dict[str, list[bytes]]:
    """Every record that the broker keeps, by subject, in stream order."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for message in await kept(server, *streams):
        assert message.subject is not None
        found[message.subject] += records(message)
    return found
