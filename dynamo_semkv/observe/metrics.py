"""Metrics: the catalogue as a Prometheus registry.

    Metrics()   .opened(event) .provider_answered(...) .closed(route) .orphan(orphan)   counted as it happens
                .watch(state)    everything else, read from a RouterState at scrape time
                .text()          the exposition, for our own /metrics and for Dynamo's status server

Series of replicas exist only while the replica is alive: each scrape makes them from the state, so a late write cannot
bring back one that is gone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dynamo_semkv.advice.decision import DecisionReason
from dynamo_semkv.config.schema import PlacementMode
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.contracts.route_events import RouteOpened
from dynamo_semkv.evidence.deadline import LookupStatus
from dynamo_semkv.observe import catalogue
from dynamo_semkv.observe.health import readiness
from dynamo_semkv.observe.state import RouterState, stream_states
from dynamo_semkv.outcome.closed import ClosedRoute, CrossCheck, OrphanReason, OrphanReport, TtftClass
from dynamo_semkv.outcome.totals import bounded
from dynamo_semkv.telemetry.label_sets import SPAN_STATES
from dynamo_semkv.telemetry.metric_spec import SPANS, MetricSpec
from dynamo_semkv.telemetry.throttled import Throttled

_LOOKUPS = frozenset(status.value for status in LookupStatus)
_HIT, _SKIPPED = LookupStatus.HIT.value, LookupStatus.SKIPPED.value
_MODES = frozenset(mode.value for mode in PlacementMode)
_DECISIONS = frozenset(reason.value for reason in DecisionReason)
_REASONS = frozenset(reason.value for reason in Reason) | frozenset(reason.value for reason in OrphanReason)
_TIERS = frozenset(tier.value for tier in Tier)
_PROVIDERS = frozenset({"fingerprint", "embedding", "semblend", "dynamo"})
_MAX_STATE_LABELS = 64
_WATCHED = (
    (Outcome.MATERIALIZED_EXACT, Reason.OK),
    (Outcome.DECLINED, Reason.NOT_IDENTICAL),
    (Outcome.DECLINED, Reason.NOT_RESIDENT),
    (Outcome.STALE_DONOR, Reason.DONOR_EVICTED),
    (Outcome.STALE_DONOR, Reason.GENERATION_STALE),
    (Outcome.NAMESPACE_MISMATCH, Reason.NAMESPACE_DIFFERS),
    (Outcome.LOAD_FAILED, Reason.COPY_FAILED),
    (Outcome.UNCONFIRMED, Reason.NO_REPORT),
    (Outcome.REFUSED, Reason.REQUEST_REFUSED),
)
"""The outcomes that alerts are written for."""
_READY = {"ready": 1.0, "degraded": 0.5, "not_ready": 0.0}

BATCH = 32
"""So many decisions and answers are counted in one go; a scrape counts the rest first."""
_Answer = tuple[str, LookupStatus, float]
_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


M = TypeVar("M", Counter, Histogram)


class _Labelled(Generic[M]):
    """A family whose series are found by one dict lookup: several are counted for every request, and prometheus_client
    would take a lock and build the label texts again each time. Only for closed sets of labels."""

    def __init__(self, family: M) -> None:
        self._family: M = family
        self._series: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = self._family.labels(*values)
        return found


class Metrics:
    """One registry. The event loop counts; `text` may be called in any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._uncounted: deque[RouteOpened | _Answer] = deque()
        self._funnel = {
            "input": self._counter(catalogue.INPUT),
            "evidence": self._counter(catalogue.EVIDENCE),
            "placed": self._counter(catalogue.PLACED),
            "hinted": self._counter(catalogue.HINTED),
            "materialized": self._counter(catalogue.MATERIALIZED),
            "beyond_dynamo": self._counter(catalogue.BEYOND_DYNAMO),
            "unhinted": self._counter(catalogue.UNHINTED),
        }
        self._lookups = _Labelled(self._counter(catalogue.LOOKUPS))
        self._lookup_seconds = self._histogram(catalogue.LOOKUP_SECONDS)
        self._provider_lookups = _Labelled(self._counter(catalogue.PROVIDER_LOOKUPS))
        self._provider_seconds = _Labelled(self._histogram(catalogue.PROVIDER_SECONDS))
        self._placements = _Labelled(self._counter(catalogue.PLACEMENTS))
        self._discovery_only = self._counter(catalogue.DISCOVERY_ONLY)
        self._outcomes = _Labelled(self._counter(catalogue.OUTCOMES))
        self._cross_checks = _Labelled(self._counter(catalogue.CROSS_CHECKS))
        self._ttft = _Labelled(self._histogram(catalogue.TTFT))
        self._load_seconds = _Labelled(self._histogram(catalogue.LOAD_SECONDS))
        self._saved = _Labelled(self._histogram(catalogue.TTFT_SAVED))
        self._at_zero()

    def opened(self, event: RouteOpened) -> None:
        """Counts a decision and its lookup."""
        self._count_later(event)

    def provider_answered(self, provider: str, status: LookupStatus, seconds: float) -> None:
        """Counts one provider's answer to one lookup and its duration in seconds."""
        self._count_later((provider, status, seconds))

    def _count_later(self, event: RouteOpened | _Answer) -> None:
        """Keeps what is to be counted until a scrape, or until BATCH of them are there: counting one by one, between
        requests, takes several times as long."""
        self._uncounted.append(event)
        if len(self._uncounted) >= BATCH:
            self._count()

    def _count(self) -> None:
        """Counts what was kept. Runs in any thread: a page is read in another one than requests are served in."""
        while True:
            try:
                event = self._uncounted.popleft()
            except IndexError:
                return
            try:
                if isinstance(event, RouteOpened):
                    self._opened(event)
                else:
                    self._answered(*event)
            except Exception:  # noqa: BLE001 - one that cannot be counted may not cost the others; logged
                _throttled.exception("a metric was not counted")

    def _opened(self, event: RouteOpened) -> None:
        lookup = bounded(event.lookup, _LOOKUPS)
        self._lookups.labels(lookup).inc()
        if lookup != _SKIPPED:
            self._lookup_seconds.observe(event.lookup_seconds)
        self._placements.labels(bounded(event.mode, _MODES), bounded(event.decision_reason, _DECISIONS)).inc()

        if lookup == _HIT and event.placed_tokens == 0:
            self._discovery_only.inc()

    def _answered(self, provider: str, status: LookupStatus, seconds: float) -> None:
        name = bounded(provider, _PROVIDERS)
        self._provider_lookups.labels(name, status._value_).inc()
        if status is not LookupStatus.SKIPPED:
            self._provider_seconds.labels(name).observe(seconds)

    def closed(self, route: ClosedRoute) -> None:
        """Counts the outcome, the funnel and the times of a closed route."""
        for step, tokens in zip(route.funnel._fields, route.funnel, strict=True):
            if tokens:
                self._funnel[step].inc(tokens)
        self._outcomes.labels(route.outcome.value, route.reason.value).inc()
        self._cross_checks.labels(route.cross_check.value).inc()
        observed, report = route.observed, route.report
        if route.ttft_class is not None and observed is not None and observed.ttft_seconds is not None:
            self._ttft.labels(route.ttft_class.value).observe(observed.ttft_seconds)
        if report is None or not report.confirmed:
            return
        tier = report.tier.value if report.tier is not None else "unknown"
        if route.saving is not None and route.saving.saved_seconds is not None:
            self._saved.labels(bounded(tier, _TIERS)).observe(route.saving.saved_seconds)
        if report.load_seconds is not None:
            self._load_seconds.labels(bounded(tier, _TIERS)).observe(report.load_seconds)

    def orphan(self, orphan: OrphanReport) -> None:
        """Counts a report that belongs to no route."""
        self._outcomes.labels(Outcome.ORPHAN_REPORT.value, bounded(orphan.reason.value, _REASONS)).inc()

    def watch(self, state: Callable[[], RouterState]) -> None:
        """Makes `text()` also show what `state()` returns; to be called once."""
        self._registry.register(_StateMetrics(state))

    def text(self) -> str:
        """Prometheus text format 0.0.4, without the `_created` series that double every counter."""
        self._count()
        return generate_latest(_WithoutCreated(self._registry)).decode()

    def _at_zero(self) -> None:
        """Creates the series that operators watch before anything happens: a rate needs a sample from before the first
        event."""
        for status in LookupStatus:
            self._lookups.labels(status.value)
        for check in CrossCheck:
            self._cross_checks.labels(check.value)
        for ttft_class in TtftClass:
            self._ttft.labels(ttft_class.value)
        for tier in Tier:
            self._load_seconds.labels(tier.value)
            self._saved.labels(tier.value)
        for outcome, reason in _WATCHED:
            self._outcomes.labels(outcome.value, reason.value)
        for orphan in OrphanReason:
            self._outcomes.labels(Outcome.ORPHAN_REPORT.value, orphan.value)

    def _counter(self, spec: MetricSpec) -> Counter:
        return Counter(spec.name, spec.meaning, spec.labels, registry=self._registry)

    def _histogram(self, spec: MetricSpec) -> Histogram:
        return Histogram(spec.name, spec.meaning, spec.labels, buckets=spec.buckets, registry=self._registry)


class _WithoutCreated:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _StateMetrics(Collector):
    def __init__(self, state: Callable[[], RouterState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield from _router(state)
        yield from _bus(state)
        yield from _catalog(state)
        yield from _replicas(state)


def _family(spec: MetricSpec, values: Mapping[tuple[str, ...], float]) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.name, spec.meaning, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _router(state: RouterState) -> Iterator[Metric]:
    yield _family(catalogue.READY, {(): _READY[readiness(state).state]})
    yield _family(catalogue.CONFIG, {(bounded(state.mode, _MODES), state.config_hash): 1.0})
    yield _family(catalogue.RELOAD_REFUSED, {(): float(bool(state.configuration.get("last_reload_error")))})
    learned = state.calibration.get("match_types", {})
    yield _family(catalogue.EXPECTED_SHARE, {(name,): known["share"] for name, known in learned.items()})
    tiers = state.calibration.get("tiers", {})
    yield _family(catalogue.EXPECTED_SAVING, {(name,): known["saving"] for name, known in tiers.items()})
    yield _family(catalogue.OPEN_ROUTES, {(): state.open_routes})
    yield _family(catalogue.HELD_REPORTS, {(): state.held_reports})
    yield _family(catalogue.BOOK_EVENTS, {(name,): count for name, count in asdict(state.book).items()})
    yield _family(catalogue.FALLBACKS, _by_name({**dict.fromkeys(catalogue.FALLBACK_REASONS, 0), **state.fallbacks}))
    if state.spans:
        yield _family(SPANS, {(name,): state.spans.get(name, 0) for name in SPAN_STATES})


def _bus(state: RouterState) -> Iterator[Metric]:
    sides = {"publish": state.publisher, "subscribe": state.subscriber}
    known = {side: stats for side, stats in sides.items() if stats is not None}
    yield _family(catalogue.BUS_CONNECTED, {(side,): float(stats.connected) for side, stats in known.items()})
    yield _family(catalogue.BUS_RECONNECTS, {(side,): float(stats.reconnects) for side, stats in known.items()})
    if state.publisher is not None:
        yield _family(catalogue.BUS_BUFFERED, {(): state.publisher.buffered})
        yield _family(catalogue.BUS_DROPPED, {(): state.publisher.dropped})
    yield _family(catalogue.STREAM_CAUGHT_UP, {(s.name,): float(s.caught_up) for s in state.streams})
    yield _family(catalogue.STREAM_MESSAGES, {(s.name,): s.messages for s in state.streams})
    refused: dict[tuple[str, ...], float] = {}
    for stream in state.streams:
        refused[stream.name, "malformed"] = stream.malformed
        refused[stream.name, "unsupported_version"] = stream.unsupported_version
        refused[stream.name, "foreign_subject"] = stream.foreign_subject
    yield _family(catalogue.STREAM_REFUSED, refused)


def _catalog(state: RouterState) -> Iterator[Metric]:
    yield _family(catalogue.CATALOG_DONORS, {(): state.catalog.get("donors", 0)})
    yield _family(catalogue.CATALOG_STREAMS, {(name,): count for name, count in stream_states(state.catalog).items()})
    yield _family(catalogue.CATALOG_EVENTS, _by_name(state.catalog.get("counts", {})))


def _replicas(state: RouterState) -> Iterator[Metric]:
    standings: dict[tuple[str, ...], float] = {}
    for replica in state.replicas:
        standings[(replica.standing,)] = standings.get((replica.standing,), 0.0) + 1.0
    yield _family(catalogue.REPLICAS, standings)
    for spec, field in (
        (catalogue.REPLICA_PREFILL, "queued_prefill_tokens"),
        (catalogue.REPLICA_DECODE, "active_decode_blocks"),
        (catalogue.REPLICA_SLAB, "resident_blocks"),
    ):
        known = [(replica, getattr(replica, field)) for replica in state.replicas]
        yield _family(spec, {(str(r.worker_id), str(r.dp_rank)): value for r, value in known if value is not None})
    rates = {row["replica"]: row["tokens_per_second"] for row in state.calibration.get("prefill", ())}
    shown: dict[tuple[str, ...], float] = {
        (str(r.worker_id), str(r.dp_rank)): rates[r.name] for r in state.replicas if r.name in rates
    }
    yield _family(catalogue.REPLICA_RATE, shown)


def _by_name(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Counts by name. The names are closed sets where they are made; their number is bounded here all the same."""
    values: dict[tuple[str, ...], float] = {}
    for name, count in sorted(counts.items()):
        key = (str(getattr(name, "value", name)),) if len(values) < _MAX_STATE_LABELS else ("other",)
        values[key] = values.get(key, 0.0) + count
    return values
