"""Intake: reads the bus into the tracker, the donor catalog and the replica directory. RouteJournal: publishes a
router's own route events.

    Intake(subscriber, tracker, apply_donor_event=..., announce=..., route_opened=None, monotonic=time.monotonic,
           wall=time.time)
    await intake.start(); await intake.close()
    RouteJournal(publisher, intake, router_name)   .opened(event)   .observed(event)

Two phases. *Replay*: what the bus kept is folded into the tracker in the order in which the broker stored it, by the
broker's times. *Live*: what arrives counts as of now, by a clock that nobody can set. While the bus is away or catching
up, time stands still for open routes, because their reports could not have arrived. A router's own events go into the
tracker first and to the bus second; they come back as duplicates.

Malformed messages are counted by what is wrong with them and dropped; nothing here raises into the subscription or into
a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dynamo_semkv.bus.publishing import Publisher
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.codec import (
    JSON,
    MSGPACK,
    UnsupportedVersion,
    decode_announcement,
    decode_donor_event,
    decode_pack,
    decode_report,
    decode_route_event,
    encode_route_event,
)
from dynamo_semkv.contracts.donor_events import DonorEvent
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import stable_worker_id
from dynamo_semkv.contracts.pack import PACK
from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.contracts.route_events import RouteEvent, RouteObserved, RouteOpened
from dynamo_semkv.outcome.bus_clock import BusClock
from dynamo_semkv.outcome.replay import Replay
from dynamo_semkv.outcome.route_tracker import RouteTracker
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

_T = TypeVar("_T")

TICK_SECONDS = 0.5
MAX_HELD_EVENTS = 20_000
"""Own route events that wait for the end of the replay. Events beyond that come back from the bus."""

JoinedEvent = RouteOpened | RouteObserved | MaterializationReport
Received = tuple[JoinedEvent, str | None]
"""An event and the bus subject that it came on; None: it is this router's own."""
_JOINED = (subjects.ROUTE_STREAM, subjects.REPORT_STREAM)


class Intake:
    """One event loop. `subscriber` is started and closed by whoever made it; `start` subscribes and ticks."""

    def __init__(
        self,
        subscriber: BusSubscriber,
        tracker: RouteTracker,
        *,
        apply_donor_event: Callable[[DonorEvent, float], object],
        announce: Callable[[ReplicaAnnouncement], object],
        route_opened: Callable[[RouteOpened], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`apply_donor_event(event, stored_at)`: `stored_at` is when the broker stored it, as `clock` counts."""
        self.counts: Counter[str] = Counter()
        """Counts of records: `<stream>.messages`, `.malformed`, `.unsupported_version`, `.foreign_subject`; `own_held`,
        `own_dropped`, `own_echoes`. A pack that cannot be read counts as one."""
        self._unsupported: dict[str, tuple[float, str]] = {}
        self._subscriber = subscriber
        self._tracker = tracker
        self._apply_donor_event = apply_donor_event
        self._announce = announce
        self._route_opened = route_opened
        self._monotonic = monotonic
        self._epoch = wall() - monotonic()
        self.clock = BusClock(monotonic)
        self._replay: Replay[Received] | None = Replay(_JOINED)
        self._replayed_to: float | None = None
        self._own: deque[RouteEvent] = deque()
        self._own_subject: str | None = None
        self._paused_at: float | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def live(self) -> bool:
        """Whether everything that the bus had kept at the start is in the tracker."""
        return self._replay is None

    @property
    def waiting(self) -> int:
        """Own events that wait for the end of the replay."""
        return len(self._own)

    def unsupported(self, stream: str) -> tuple[float, str] | None:
        """Seconds since the last message of a version that this release cannot read, and that version; None: none
        came."""
        found = self._unsupported.get(stream)
        return (self._monotonic() - found[0], found[1]) if found is not None else None

    async def start(self) -> None:
        """Subscribes to all streams and starts the ticks; does not wait for the replay."""
        subscribe = self._subscriber.subscribe_stream
        subscribe(subjects.DONOR_STREAM, ">", self.on_donor_event)  # both subjects of the stream, in one order
        subscribe(
            subjects.ANNOUNCEMENT_STREAM,
            f"{subjects.ANNOUNCEMENTS}.>",
            self.on_announcement,
            start="last_per_subject",
        )
        routes, reports = subjects.ROUTE_STREAM, subjects.REPORT_STREAM
        subscribe(
            routes,
            f"{subjects.ROUTES}.>",
            self.on_route_event,
            on_caught_up=partial(self.caught_up, routes),
            known=self.is_own_echo,
        )
        subscribe(reports, f"{subjects.REPORTS}.>", self.on_report, on_caught_up=partial(self.caught_up, reports))
        self._ticker = asyncio.ensure_future(self._tick_for_ever())

    async def close(self) -> None:
        """Stops the ticks; the subscriber belongs to whoever made it."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None

    def on_donor_event(self, message: Message) -> None:
        """Checks a donor event and passes it to the catalog. On a replica's own subject it must be that replica's."""
        event = self._decoded(message, "donors", lambda raw: decode_donor_event(raw, message.content_type or JSON))
        if event is None:
            return
        if message.subject != subjects.DONOR_EVENTS:  # on that subject any emitter may send, for any worker
            speaker = subjects.speaker(message.subject)
            if speaker is None or (stable_worker_id(speaker.stable_routing_id), speaker.dp_rank) != (
                event.worker_id,
                event.dp_rank,
            ):
                self._refuse_foreign(message, "donors", f"worker {event.worker_id} rank {event.dp_rank}")
                return
        self._apply_donor_event(event, message.timestamp)

    def on_announcement(self, message: Message) -> None:
        """Checks that the sender announces itself and passes it on."""
        announcement = self._decoded(message, "announcements", decode_announcement)
        if announcement is not None and self._sent_by_its_replica(message, "announcements", announcement):
            self._announce(announcement)

    def is_own_echo(self, subject: str, records: int) -> bool:
        """Whether a message of the route stream, of so many records, is an echo of this router's own; the records are
        counted here then, and need not be read."""
        # An own event that was dropped during the replay comes back from the bus only, so it must be read.
        if self._replay is not None or subject != self._own_subject or self.counts["own_dropped"]:
            return False
        self.counts["routes.messages"] += records
        self.counts["own_echoes"] += records
        return True

    def on_route_event(self, message: Message) -> None:
        """Puts a route event into the tracker; only the router that opened a route may open or end it."""
        event = self._decoded(message, "routes", decode_route_event)
        if isinstance(event, RouteOpened) and message.subject != subjects.routes(event.router):
            self._refuse_foreign(message, "routes", f"router {event.router}")
        elif event is not None:
            counted = self._arrived(subjects.ROUTE_STREAM, message.timestamp, (event, message.subject))
            if counted and self._route_opened is not None and isinstance(event, RouteOpened):
                self._route_opened(event)

    def on_report(self, message: Message) -> None:
        """Checks that the sender reports for itself and puts the report into the tracker."""
        report = self._decoded(message, "reports", decode_report)
        if report is not None and self._sent_by_its_replica(message, "reports", report):
            self._arrived(subjects.REPORT_STREAM, message.timestamp, (report, message.subject))

    def set_own_subject(self, subject: str) -> None:
        """Sets the subject of this router's own events: they are known already when they come back from the bus, and
        reading them again would cost time at every request."""
        self._own_subject = subject

    def record_own(self, event: RouteEvent) -> None:
        """Takes an event of this router: into the tracker at once, or after the replay while that goes on."""
        if self._replay is None:
            self._apply((event, None), self._now())
            return
        self.counts["own_held"] += 1
        self._own.append(event)
        while len(self._own) > MAX_HELD_EVENTS:
            self._own.popleft()
            self.counts["own_dropped"] += 1

    def caught_up(self, stream: str) -> None:
        """A joined stream has delivered what was stored; after both, the live phase begins."""
        if self._replay is None:
            return
        self._replay.caught_up(stream)
        self._apply_ready()
        if self._replay.done:
            self._go_live()

    def tick(self) -> None:
        """Closes what is due; nothing during the replay or while a joined stream is behind. Called every
        TICK_SECONDS."""
        if self._replay is not None:
            return
        now = self._now()
        if not all(self._subscriber.caught_up(stream) for stream in _JOINED):
            if self._paused_at is None:
                self._paused_at = now
            return
        if self._paused_at is not None:
            self._tracker.rebase(now - self._paused_at)
            self._paused_at = None
        self._tracker.expire(now)

    def _arrived(self, stream: str, timestamp: float, received: Received) -> bool:
        """Whether the event counts, as far as is known yet."""
        if self._replay is None:
            return self._apply(received, self._now())
        self._replay.add(stream, timestamp, received)
        self._apply_ready()
        return True

    def _apply_ready(self) -> None:
        assert self._replay is not None
        for timestamp, received in self._replay.ready():
            self._tracker.expire(timestamp)
            self._apply(received, timestamp)
            self._replayed_to = timestamp

    def _go_live(self) -> None:
        self._replay = None
        now = self._now()
        if self._replayed_to is not None:
            # The two clocks need not agree: the newest event of the past counts as of now.
            self._tracker.rebase(now - self._replayed_to)
        while self._own:
            self._apply((self._own.popleft(), None), now)

    def _apply(self, received: Received, at: float) -> bool:
        """False: another router has opened that route, so the sender may neither open nor end it."""
        event, subject = received
        if isinstance(event, MaterializationReport):
            self._tracker.report(event, at)
            return True
        counted = (
            self._tracker.opened(event, at)
            if isinstance(event, RouteOpened)
            else self._tracker.observed(event, at, subject=subject)
        )
        if not counted:
            allowed = f"the router that opened route {event.route_id}"
            self._refuse("routes", "foreign_subject", ContractError("subject", subject, allowed))
        return counted

    def _now(self) -> float:
        return self._epoch + self._monotonic()

    def _sent_by_its_replica(
        self, message: Message, stream: str, event: ReplicaAnnouncement | MaterializationReport
    ) -> bool:
        """Whether a worker reports or announces itself only: a broker with users lets it publish under its own name
        alone."""
        if subjects.speaker(message.subject) == (event.stable_routing_id, event.dp_rank):
            return True
        self._refuse_foreign(message, stream, f"{event.stable_routing_id} rank {event.dp_rank}")
        return False

    def _refuse_foreign(self, message: Message, stream: str, sender: str) -> None:
        self._refuse(
            stream, "foreign_subject", ContractError("subject", message.subject, f"the subject of the sender, {sender}")
        )

    def _decoded(self, message: Message, stream: str, decode: Callable[[bytes], _T]) -> _T | None:
        self.counts[f"{stream}.messages"] += 1
        self.clock.message_arrived(message.timestamp)
        try:
            if message.content_type == PACK:
                decode_pack(message.payload)  # the bus could not: this raises the reason
                raise ContractError("pack", message.subject, "one that the bus takes apart")
            return decode(message.payload)
        except UnsupportedVersion as error:
            self._unsupported[stream] = (self._monotonic(), str(error.value)[:40])
            self._refuse(stream, "unsupported_version", error)
        except ContractError as error:
            self._refuse(stream, "malformed", error)
        return None

    def _refuse(self, stream: str, kind: str, error: ContractError) -> None:
        name = f"{stream}.{kind}"
        self.counts[name] += 1
        _throttled.warning("%s: message dropped: %s", name, error, key=name)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - a tick that fails may not end all later ones; counted and logged
                self.counts["tick_errors"] += 1
                _throttled.exception("closing overdue routes failed; the next tick tries again")


class RouteJournal:
    """Records what this router decided and saw. Never raises and never waits: a request does not depend on its
    record."""

    def __init__(self, publisher: Publisher, intake: Intake, router_name: str) -> None:
        self.router_name = router_name
        self.counts: Counter[str] = Counter()
        """`published`, `not_published` (bus buffer full or refused), `errors`."""
        self._publisher = publisher
        self._intake = intake
        self._subject = subjects.routes(router_name)
        intake.set_own_subject(self._subject)

    def opened(self, event: RouteOpened) -> None:
        """Puts the event into the tracker, then publishes it."""
        self._write(event)

    def observed(self, event: RouteObserved) -> None:
        """Puts the event into the tracker, then publishes it."""
        self._write(event)

    def _write(self, event: RouteEvent) -> None:
        try:
            self._intake.record_own(event)
            accepted = self._publisher.publish(self._subject, encode_route_event(event), content_type=MSGPACK)
        except Exception:  # noqa: BLE001 - whatever is wrong here, the request goes on; counted and logged
            self.counts["errors"] += 1
            _throttled.exception("a route event could not be published")
            return
        self.counts["published" if accepted else "not_published"] += 1
