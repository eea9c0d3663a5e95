"""The four streams: what the bus keeps, how long, and who owns which subject."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects

_DUPLICATE_WINDOW_SECONDS = 600.0
"""How long the broker remembers message ids. An outage between a publish and its acknowledgement that lasts longer
than this can store one message a subject twice; consumers are idempotent by event id, report id and route id."""

_NAME_IN_USE = 10058

SUBJECTS: dict[str, tuple[str, ...]] = {
    subjects.DONOR_STREAM: (subjects.DONOR_EVENTS, f"{subjects.DONOR_EVENTS}.>"),
    subjects.REPORT_STREAM: (f"{subjects.REPORTS}.>",),
    subjects.ROUTE_STREAM: (f"{subjects.ROUTES}.>",),
    subjects.ANNOUNCEMENT_STREAM: (f"{subjects.ANNOUNCEMENTS}.>",),
}

STREAMS = tuple(SUBJECTS)


def stream_of(subject: str) -> str | None:
    """The stream that keeps a concrete subject; `None` for what is never kept (hints, and anything not ours)."""
    for stream, patterns in SUBJECTS.items():
        for pattern in patterns:
            if subject == pattern or (
                pattern.endswith(".>") and subject.startswith(pattern[:-1]) and subject != pattern
            ):
                return stream
    return None


def in_any_order(subject: str) -> bool:
    """Whether readers may get the messages in another order than they were published in: routes and reports are joined
    by id, but donor events are numbered, and the last announcement counts."""
    return stream_of(subject) in (subjects.ROUTE_STREAM, subjects.REPORT_STREAM)


def stream_config(stream: str, settings: BusConfig) -> StreamConfig:
    """Old messages go first when a stream is full: the newest state is the useful one. Announcements keep the last
    per replica. Nothing but age and size removes a message, whoever asks."""
    last_only = stream == subjects.ANNOUNCEMENT_STREAM
    return StreamConfig(
        name=stream,
        subjects=list(SUBJECTS[stream]),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=settings.stream_max_age_seconds,
        max_bytes=settings.stream_max_bytes,
        max_msgs_per_subject=1 if last_only else -1,
        num_replicas=settings.replicas,
        deny_delete=True,
        deny_purge=True,
        duplicate_window=min(_DUPLICATE_WINDOW_SECONDS, settings.stream_max_age_seconds),
    )


async def ensure_streams(js: JetStreamContext, settings: BusConfig) -> dict[str, js_errors.APIError]:
    """Create the streams, or bring those that exist to these settings. Safe to call from many processes at once.

    Returns what the broker refused, by stream: no room, or a stream of somebody else on the same subjects. The others
    are there then. Does nothing without `bus.manage_streams`. Raises nats.errors.Error or asyncio.TimeoutError when
    JetStream is off or does not answer.
    """
    refused: dict[str, js_errors.APIError] = {}
    for stream in STREAMS if settings.manage_streams else ():
        try:
            await _ensure(js, stream_config(stream, settings))
        except js_errors.APIError as error:
            # A broker that is full refuses a stream that it already has, too.
            if not await _is_there(js, stream_config(stream, settings)):
                refused[stream] = error
    return refused


async def _is_there(js: JetStreamContext, wanted: StreamConfig) -> bool:
    """Whether the stream exists with these subjects and limits."""
    try:
        found = (await js.stream_info(str(wanted.name))).config
    except js_errors.APIError:
        return False
    return all(getattr(found, name) == getattr(wanted, name) for name in ("subjects", "max_bytes", "max_age"))


async def _ensure(js: JetStreamContext, config: StreamConfig) -> None:
    try:
        await js.add_stream(config)  # answers with what exists when the configuration is equal
    except js_errors.BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        await js.update_stream(config)
