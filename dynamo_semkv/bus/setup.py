"""Creates the streams once, as a user that may: for brokers whose permissions forbid it to routers and workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec.structs
import nats.errors
from nats.aio.client import Client

from dynamo_semkv.bus.connection import connect_once
from dynamo_semkv.bus.refusals import words_of
from dynamo_semkv.bus.server_check import LENIENT, is_strict, objection, version_of
from dynamo_semkv.bus.streams import STREAMS, ensure_streams
from dynamo_semkv.config.schema import BusConfig

_API_SECONDS = 5.0


class BusError(RuntimeError):
    """The broker is away, refuses us, has no JetStream, is too old or not strict; the message says which."""


@dataclass(frozen=True)
class StreamFound:
    """One stream after the set-up, as the broker describes it."""

    name: str
    messages: int
    bytes: int
    max_age_seconds: float
    replicas: int


async def set_up(settings: BusConfig) -> list[StreamFound]:
    """Creates the four streams or brings them to `settings`, whatever `bus.manage_streams` says. Raises BusError."""
    client = Client()
    try:
        await connect_once(client, settings, "semkv-setup")
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        raise BusError(f"bus.url: no connection ({type(error).__name__}: {error})") from error
    try:
        old = objection(version_of(client))
        if old is not None:
            raise BusError(f"{old}; see docs/security.md")
        js = client.jetstream(timeout=_API_SECONDS)
        refused = await ensure_streams(js, msgspec.structs.replace(settings, manage_streams=True))
        if refused:
            told = "; ".join(f"{stream}: {words_of(error)}" for stream, error in refused.items())
            raise BusError(f"JetStream refused {told}")
        found = [await js.stream_info(name) for name in STREAMS]
        if await is_strict(client) is False:
            raise BusError(f"the streams are made, but {LENIENT}; see docs/security.md")
    except asyncio.TimeoutError as error:
        raise BusError(
            "no answer from JetStream: is it on (`jetstream {}` in the server's configuration), may this user use it, "
            f"and is bus.inbox_prefix ({settings.inbox_prefix!r}) one that this user may subscribe to? See "
            "docs/security.md"
        ) from error
    except nats.errors.Error as error:
        raise BusError(f"JetStream refused: {error}") from error
    finally:
        await client.close()
    return [
        StreamFound(
            str(info.config.name),
            info.state.messages,
            info.state.bytes,
            info.config.max_age or 0.0,
            info.config.num_replicas or 1,
        )
        for info in found
    ]
