"""StateCollector: the parts of a running router, read together.

    StateCollector(config=..., config_hash=..., router=..., history=..., tracker=..., intake=..., publisher=...,
               subscriber=..., catalog=catalog.snapshot, providers=lookup.snapshot, replicas=..., fallbacks=...,
               metrics=Metrics())
    .state() -> RouterState   .snapshot() -> dict   .readiness() -> Readiness   .metrics_text() -> str

`replicas()` gives the live replicas as the router knows them, `fallbacks()` its counts by reason. A part whose state
cannot be read shows as unknown: reading it never takes the page, or readiness, down with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dynamo_semkv.bus.publisher_stats import PublisherStats
from dynamo_semkv.bus.subscriber import SubscriberStats
from dynamo_semkv.config.schema import Config
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


class StateCollector:
    """Reads the parts anew at each call and keeps nothing but its configuration."""

    def __init__(
        self,
        *,
        config: Config,
        config_hash: str,
        router: str,
        history: History,
        tracker: RouteTracker,
        intake: Intake,
        publisher: PublisherView,
        subscriber: SubscriberView,
        catalog: Callable[[], Mapping[str, Any]],
        providers: Callable[[], Mapping[str, Any]],
        calibration: Callable[[], Mapping[str, Any]] = dict,
        configuration: Callable[[], Mapping[str, Any]] = dict,
        replicas: Callable[[], Sequence[ReplicaStatus]],
        fallbacks: Callable[[], Mapping[str, int]],
        dynamo: Callable[[], DynamoTokens | None] = lambda: None,
        spans: Callable[[], Mapping[str, int]] = dict,
        metrics: Metrics,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._config_hash = config_hash
        self._router = router
        self._history = history
        self._tracker = tracker
        self._intake = intake
        self._publisher = publisher
        self._subscriber = subscriber
        self._catalog = catalog
        self._providers = providers
        self._calibration = calibration
        self._configuration = configuration
        self._replicas = replicas
        self._fallbacks = fallbacks
        self._dynamo = dynamo
        self._spans = spans
        self._metrics = metrics
        self._wall = wall
        self._monotonic = monotonic
        self._began = monotonic()
        self._failing: set[str] = set()
        metrics.watch(self.state)

    def reload(self, config: Config, config_hash: str) -> None:
        """Shows the new configuration from now on."""
        self._config, self._config_hash = config, config_hash

    def state(self) -> RouterState:
        """Everything at this moment; unknown values for a part that raises."""
        history, tracker, placement = self._history, self._tracker, self._config.placement
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
            open_routes=tracker.open_routes + self._intake.waiting,
            held_reports=tracker.held_reports,
            replayed=self._intake.live,
            book=tracker.stats,
            replicas=tuple(self._ask("replicas", self._replicas, ())),
            publisher=self._publisher.stats(),
            subscriber=self._subscriber.stats(),
            streams=[self._stream(name, stream) for name, stream in _STREAMS.items()],
            catalog=self._ask("catalog", self._catalog, {}),
            providers=self._ask("providers", self._providers, {}),
            calibration=self._ask("calibration", self._calibration, {}),
            configuration=self._ask("configuration", self._configuration, {}),
            fallbacks=self._ask("fallbacks", self._fallbacks, {}),
            dynamo=self._ask("dynamo", self._dynamo, None),
            spans=self._ask("spans", self._spans, {}),
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
        counts = self._intake.counts
        return StreamStatus(
            name,
            self._subscriber.caught_up(stream),
            counts[f"{name}.messages"],
            counts[f"{name}.malformed"],
            counts[f"{name}.unsupported_version"],
            counts[f"{name}.foreign_subject"],
            self._intake.unsupported(name),
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
