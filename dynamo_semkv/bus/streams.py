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

_SUBJECTS: dict[str, tuple[str, ...]] = {
    subjects.DONOR_STREAM: (subjects.DONOR_EVENTS, f"{subjects.DONOR_EVENTS}.>"),
    subjects.REPORT_STREAM: (f"{subjects.REPORTS}.>",),
    subjects.ROUTE_STREAM: (f"{subjects.ROUTES}.>",),
    subjects.ANNOUNCEMENT_STREAM: (f"{subjects.ANNOUNCEMENTS}.>",),
}

STREAMS = tuple(_SUBJECTS)


def stream_of(subject: str) -> str | None:
    """The stream that keeps a concrete subject; `None` for what is never kept (hints, and anything not ours)."""
    for stream, patterns in _SUBJECTS.items():
        for pattern in patterns:
            if subject == pattern or (
                pattern.endswith(".>") and subject.startswith(pattern[:-1]) and subject != pattern
            ):
                return stream
    return None


def in_any_order(subject: str) -> bool:
    """May its readers get messages in another order than they were published in? Routes and reports are joined by id; donor events are
    numbered, and of announcements the last one counts."""
    return stream_of(subject) in (subjects.ROUTE_STREAM, subjects.REPORT_STREAM)


def stream_config(stream: str, settings: BusConfig) -> StreamConfig:
    """Old messages go first when a stream is full: the newest state is the useful one. Announcements keep the last
    per replica."""
    last_only = stream == subjects.ANNOUNCEMENT_STREAM
    return StreamConfig(
        name=stream,
        subjects=list(_SUBJECTS[stream]),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=settings.stream_max_age_seconds,
        max_bytes=settings.stream_max_bytes,
        max_msgs_per_subject=1 if last_only else -1,
        num_replicas=settings.replicas,
        duplicate_window=min(_DUPLICATE_WINDOW_SECONDS, settings.stream_max_age_seconds),
    )


async def ensure_streams(js: JetStreamContext, settings: BusConfig) -> None:
    """Create the streams, or bring those that exist to these settings. Safe to call from many processes at once.

    Does nothing without `bus.manage_streams`. Raises nats.errors.Error (also when JetStream is off, still starting, or has no room).
    """
    if not settings.manage_streams:
        return
    for stream in STREAMS:
        config = stream_config(stream, settings)
        try:
            await js.add_stream(config)  # answers with what exists when the configuration is equal
        except js_errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            await js.update_stream(config)
