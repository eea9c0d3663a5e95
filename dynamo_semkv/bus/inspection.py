"""What a broker holds of ours, for `doctor`: one look from outside that changes nothing.

await inspect(settings) -> BusInspection
"""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
from dataclasses import dataclass, field

import msgspec.structs
import nats.errors
from nats.aio.client import Client

from dynamo_semkv.bus.connection import connect_once
from dynamo_semkv.bus.server_check import is_strict, version_of
from dynamo_semkv.bus.streams import STREAMS, SUBJECTS
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects

_API_SECONDS = 3.0
_REPLAY_SECONDS = 10.0
_NO_STREAM = 10059


@dataclass(frozen=True)
class StreamSeen:
    """One of our streams as the broker has it."""

    messages: int
    max_age_seconds: float
    max_bytes: int
    replicas: int
    guarded: bool = True
    """Nobody can purge it or delete a message of it."""


@dataclass
class BusInspection:
    """Everything that `inspect` found out about one broker."""

    address: str
    """Without user and password."""
    error: str | None = None
    """Why there is no connection; everything below is then empty."""
    unknown_host: bool = False
    """The error is that the broker's host name cannot be resolved."""
    server_version: tuple[int, int] | None = None
    """Major and minor number of the nats-server that answered."""
    strict: bool | None = None
    """Whether it refuses requests of JetStream that it does not understand; None: it did not say."""
    jetstream_error: str | None = None
    streams: dict[str, StreamSeen | None] = field(default_factory=dict)
    """None: it does not exist. Absent: this user may not ask."""
    foreign: dict[str, str] = field(default_factory=dict)
    """Stream of ours that does not exist -> a stream of somebody else that has its subjects, so that ours cannot be
    made."""
    clock_offset_seconds: float | None = None
    """The broker's clock minus ours; None where the server does not tell its time."""
    announcements: list[Message] = field(default_factory=list)
    """The last announcement of every replica."""


async def inspect(settings: BusConfig) -> BusInspection:
    """Never raises for a broker that is away, refuses, or lacks JetStream: that is what is looked for."""
    found = BusInspection(",".join(url.strip().rpartition("@")[2] for url in settings.url.split(",")))
    client = Client()
    try:
        await connect_once(client, settings, "semkv-doctor")
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        found.error, found.unknown_host = f"{type(error).__name__}: {error}", isinstance(error, socket.gaierror)
        return found
    found.server_version = version_of(client)
    try:
        for stream in STREAMS:
            await _ask(client, stream, found, settings.inbox_prefix)
            if found.jetstream_error is not None:
                return found
            if found.streams.get(stream, ...) is None:
                await _ask_who_has_its_subjects(client, stream, found)
        found.strict = await is_strict(client)
    finally:
        await client.close()
    if found.streams.get(subjects.ANNOUNCEMENT_STREAM) is not None:
        found.announcements = await _announcements(settings)
    return found


async def _ask(client: Client, stream: str, found: BusInspection, inbox_prefix: str) -> None:
    try:
        answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_API_SECONDS)
    except nats.errors.NoRespondersError:
        found.jetstream_error = "JetStream is off"
        return
    except (nats.errors.Error, asyncio.TimeoutError) as error:
        found.jetstream_error = (
            f"no answer ({type(error).__name__}); may this user ask `$JS.API.STREAM.INFO.*`, and hear the answer "
            f"(bus.inbox_prefix {inbox_prefix!r})?"
        )
        return
    try:
        said = json.loads(answer.data)
        if "error" in said:
            if said["error"].get("err_code") == _NO_STREAM:
                found.streams[stream] = None
            else:
                found.jetstream_error = str(said["error"].get("description"))
            return
        config, state = said["config"], said["state"]
        found.streams[stream] = StreamSeen(
            int(state["messages"]),
            config["max_age"] / 1e9,
            int(config["max_bytes"]),
            int(config["num_replicas"]),
            guarded=config.get("deny_purge") is True and config.get("deny_delete") is True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        found.jetstream_error = f"an answer that is none of JetStream's ({type(error).__name__})"
        return
    if found.clock_offset_seconds is None and isinstance(said.get("ts"), str):
        found.clock_offset_seconds = _offset(said["ts"])


async def _ask_who_has_its_subjects(client: Client, stream: str, found: BusInspection) -> None:
    """Says nothing where this user may not ask: that the stream is missing is told all the same."""
    for subject in SUBJECTS[stream]:
        try:
            question = json.dumps({"subject": subject}).encode()
            answer = await client.request("$JS.API.STREAM.NAMES", question, timeout=_API_SECONDS)
            names = json.loads(answer.data).get("streams") or []
        except (nats.errors.Error, asyncio.TimeoutError, ValueError, AttributeError):
            return
        if names:
            found.foreign[stream] = str(names[0])
            return


def _offset(text: str) -> float | None:
    """RFC 3339 with up to nanoseconds, which Python 3.10 reads only in part."""
    head, _, fraction = text.rstrip("Z").partition(".")
    try:
        at = datetime.datetime.fromisoformat(f"{head}.{fraction[:6].ljust(6, '0')}+00:00")
    except ValueError:
        return None
    return at.timestamp() - datetime.datetime.now(datetime.timezone.utc).timestamp()


async def _announcements(settings: BusConfig) -> list[Message]:
    kept: dict[str, Message] = {}
    caught_up = asyncio.Event()

    def keep(message: Message) -> None:
        kept[message.subject] = message

    subscriber = BusSubscriber(msgspec.structs.replace(settings, manage_streams=False), "semkv-doctor")
    subscriber.subscribe_stream(
        subjects.ANNOUNCEMENT_STREAM,
        f"{subjects.ANNOUNCEMENTS}.>",
        keep,
        start="last_per_subject",
        on_caught_up=caught_up.set,
    )
    await subscriber.start()
    try:
        await asyncio.wait_for(caught_up.wait(), _REPLAY_SECONDS)
    except asyncio.TimeoutError:
        pass  # what came so far is what there is to say; the streams are listed beside it
    finally:
        await subscriber.close()
    return [kept[subject] for subject in sorted(kept)]
