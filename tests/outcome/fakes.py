"""A bus in memory: what was published is kept with the time of the broker, and replayed stream by stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo_semkv.bus.streams import stream_of
from dynamo_semkv.bus.subscription import Known, Message
from tests.outcome.build import ManualClock


@dataclass
class FakeBroker:
    clock: ManualClock
    kept: list[tuple[str, Message]] = field(default_factory=list)
    subscribers: list[FakeSubscriber] = field(default_factory=list)
    up: bool = True
    buffered: list[tuple[str, bytes, str | None]] = field(default_factory=list)

    def publish(self, subject: str, payload: bytes, *, content_type: str | None = None, **_: Any) -> bool:
        if not self.up:
            self.buffered.append((subject, payload, content_type))
            return True
        stream = stream_of(subject)
        assert stream is not None, subject
        message = Message(subject, payload, content_type, len(self.kept) + 1, self.clock())
        self.kept.append((stream, message))
        for subscriber in self.subscribers:
            subscriber.deliver(stream, message)
        return True

    def stop(self) -> None:
        self.up = False

    def restart(self) -> None:
        self.up = True
        waiting, self.buffered = self.buffered, []
        for subject, payload, content_type in waiting:
            self.publish(subject, payload, content_type=content_type)


@dataclass
class FakeSubscriber:
    """Delivers nothing until `replay`; then all that is kept, one stream after the other in the order asked for, then
    live."""

    broker: FakeBroker
    handlers: dict[str, Callable[[Message], None]] = field(default_factory=dict)
    ends: dict[str, Callable[[], None]] = field(default_factory=dict)
    replayed: set[str] = field(default_factory=set)

    def subscribe_stream(
        self,
        stream: str,
        subject_filter: str,
        handler: Callable[[Message], None],
        *,
        start: str = "all",
        on_caught_up: Callable[[], None] | None = None,
        known: Known | None = None,
    ) -> None:
        def hand_over(message: Message) -> None:
            if known is None or not known(message.subject, 1):
                handler(message)

        self.handlers[stream] = hand_over
        if on_caught_up is not None:
            self.ends[stream] = on_caught_up

    def replay(self, *streams: str) -> None:
        if self not in self.broker.subscribers:
            self.broker.subscribers.append(self)
        for stream in streams:
            for kept_stream, message in list(self.broker.kept):
                if kept_stream == stream:
                    self.handlers[stream](message)
            self.replayed.add(stream)
            if stream in self.ends:
                self.ends[stream]()

    def deliver(self, stream: str, message: Message) -> None:
        if stream in self.replayed:
            self.handlers[stream](message)

    def caught_up(self, stream: str) -> bool:
        return self.broker.up and stream in self.replayed

    def __eq__(self, other: object) -> bool:
        return self is other
