"""StateCollector: the state of a running router, read from all its parts at one moment.

It gives that state as a RouterState, as the snapshot behind the page, as readiness and as Prometheus text. A part whose
state cannot be read shows as unknown: it never takes the page, or readiness, down with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dynamo_semkv.bus.outbox import PublisherStats
from dynamo_semkv.bus.subscriber import SubscriberStats
from dynamo_semkv.config.load import Loaded
from dynamo_semkv.contracts import subjects
from dynamo_semkv.observe.dynamo_counters import DynamoTokens
from dynamo_semkv.observe.health import Readiness, readiness
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.observe.snapshot import build_snapshot
from dynamo_semkv.observe.state import ReplicaStatus, RouterState, StreamStatus
from dynamo_semkv.outcome.history import History
from dynamo_semkv.outcome.intake import Intake
from dynamo_semkv.outcome.route_tracker import RouteTracker
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

T = TypeVar("T")

RECENT_ROUTES = 50
_STREAMS = {
    "donors": subjects.DONOR_STREAM,
    "announcements": subjects.ANNOUNCEMENT_STREAM,
    "routes": subjects.ROUTE_STREAM,
    "reports": subjects.REPORT_STREAM,
}


class PublisherView(Protocol):
    """The part of BusPublisher that is used here."""

    def stats(self) -> PublisherStats:
        """Connection, buffer and drops at this moment; does not wait."""
        ...


class SubscriberView(Protocol):
    """The part of BusSubscriber that is used here."""

    def stats(self) -> SubscriberStats:
        """The connection at this moment; does not wait."""
        ...

    def caught_up(self, stream: str) -> bool:
        """Whether all that the stream has stored was delivered."""
        ...


@dataclass(frozen=True)
class RouteParts:
    """The parts that know what became of routes."""

    history: History
    tracker: RouteTracker
    intake: Intake


@dataclass(frozen=True)
class BusParts:
    """Both directions of the bus."""

    publisher: PublisherView
    subscriber: SubscriberView


@dataclass(frozen=True)
class Readings:
    """Functions that return the present state of one part each. One that raises shows as unknown, and is logged once
    until it answers again."""

    catalog: Callable[[], Mapping[str, Any]]
    """`DonorCatalog.snapshot`."""
    providers: Callable[[], Mapping[str, Any]]
    """`DeadlineRunner.snapshot`."""
    replicas: Callable[[], Sequence[ReplicaStatus]]
    """The live replicas as the router knows them."""
    fallbacks: Callable[[], Mapping[str, int]]
    """Counts by reason."""
    calibration: Callable[[], Mapping[str, Any]] = dict
    configuration: Callable[[], Mapping[str, Any]] = dict
    """`ConfigWatch.status`."""
    dynamo: Callable[[], DynamoTokens | None] = lambda: None
    spans: Callable[[], Mapping[str, int]] = dict


class StateCollector:
    """Reads the parts of a router anew at each call and keeps nothing but its configuration."""

    def __init__(
        self,
        router: str,
        loaded: Loaded,
        routes: RouteParts,
        bus: BusParts,
        readings: Readings,
        metrics: Metrics,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`router`: its name in route events. `metrics` shows the state at each scrape from now on."""
        self._router = router
        self._config, self._config_hash = loaded.config, loaded.hash
        self._routes = routes
        self._bus = bus
        self._readings = readings
        self._metrics = metrics
        self._wall = wall
        self._monotonic = monotonic
        self._began = monotonic()
        self._failing: set[str] = set()
        metrics.watch(self.state)

    def reload(self, loaded: Loaded) -> None:
        """Shows the new configuration from now on."""
        self._config, self._config_hash = loaded.config, loaded.hash

    def state(self) -> RouterState:
        """Everything at this moment; unknown values for a part that raises."""
        history, tracker, intake = self._routes.history, self._routes.tracker, self._routes.intake
        placement, readings = self._config.placement, self._readings
        return RouterState(
            now=self._wall(),
            uptime_seconds=self._monotonic() - self._began,
            router=self._router,
            mode=placement.mode.value,
            canary_percent=placement.canary_percent,
            config_hash=self._config_hash,
            history_size=self._config.outcome.history_size,
            totals=history.totals(),
            since=history.since,
            recent=history.recent(RECENT_ROUTES),
            course=history.course(),
            open_routes=tracker.open_routes + intake.waiting,
            held_reports=tracker.held_reports,
            replayed=intake.live,
            book=tracker.stats,
            replicas=tuple(self._ask("replicas", readings.replicas, ())),
            publisher=self._bus.publisher.stats(),
            subscriber=self._bus.subscriber.stats(),
            streams=[self._stream(name, stream) for name, stream in _STREAMS.items()],
            catalog=self._ask("catalog", readings.catalog, {}),
            providers=self._ask("providers", readings.providers, {}),
            calibration=self._ask("calibration", readings.calibration, {}),
            configuration=self._ask("configuration", readings.configuration, {}),
            fallbacks=self._ask("fallbacks", readings.fallbacks, {}),
            dynamo=self._ask("dynamo", readings.dynamo, None),
            spans=self._ask("spans", readings.spans, {}),
        )

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON (observe/snapshot.py)."""
        return build_snapshot(self.state())

    def readiness(self) -> Readiness:
        """The checks over the state (observe/health.py)."""
        return readiness(self.state())

    def metrics_text(self) -> str:
        """The Prometheus exposition (observe/metrics.py)."""
        return self._metrics.text()

    def _stream(self, name: str, stream: str) -> StreamStatus:
        intake = self._routes.intake
        counts = intake.counts
        return StreamStatus(
            name,
            self._bus.subscriber.caught_up(stream),
            counts[f"{name}.messages"],
            counts[f"{name}.malformed"],
            counts[f"{name}.unsupported_version"],
            counts[f"{name}.foreign_subject"],
            intake.unsupported(name),
        )

    def _ask(self, what: str, call: Callable[[], T], unknown: T) -> T:
        try:
            answer = call()
        except Exception:  # noqa: BLE001 - it shows as unknown; logged once until it answers again
            if what not in self._failing:
                self._failing.add(what)
                _throttled.exception("the state of %s cannot be read", what, key=what)
            return unknown
        self._failing.discard(what)
        return answer
