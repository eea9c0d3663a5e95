"""What a stage needs of a `BusPublisher`: one method, so that a test needs no broker."""

from __future__ import annotations

from typing import Any, Protocol


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
    ) -> bool:
        """Accepts a message or drops it; False: dropped, and counted."""
        ...


class DiscardingPublisher(Publisher):
    """Accepts everything and sends nothing: for measurements, since a real publisher only hands it to a thread."""

    def publish(self, *_: Any, **__: Any) -> bool:
        """Drops the message and says that it was accepted."""
        return True
