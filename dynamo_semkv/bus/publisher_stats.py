"""PublisherStats: what a publisher has done and holds, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublisherStats:
    """Counts are of records, what `publish` was called with: however many of them went in one stream message."""

    connected: bool
    buffered: int
    """Persistent ones that are not acknowledged yet."""
    buffered_bytes: int
    published: int
    """Acknowledged by JetStream, or handed to the connection where they are not kept."""
    dropped: int
    refused: int
    """Calls that were wrong in themselves (subject, payload, closed publisher); not counted as dropped."""
    callback_errors: int
    reconnects: int
    last_error: str | None
    refused_streams: Mapping[str, str] = field(default_factory=dict)
    """Stream -> the broker's words: what is sent for it is not kept now."""
    seconds_since_drop: float | None = None
    """None: nothing was dropped yet."""
