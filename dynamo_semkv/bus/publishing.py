"""What a stage needs of a `BusPublisher`: one method, so that a test needs no broker."""

from __future__ import annotations

from typing import Protocol


class Publisher(Protocol):
    """Thread-safe, never blocks, never raises. See `BusPublisher.publish`."""

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        content_type: str | None = None,
        message_id: str | None = None,
        persistent: bool = True,
    ) -> bool: ...


class Unsent(Publisher):
    """Takes everything and sends nothing: for measurements, since a real one hands it to a thread just so."""

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        content_type: str | None = None,
        message_id: str | None = None,
        persistent: bool = True,
    ) -> bool:
        return True
