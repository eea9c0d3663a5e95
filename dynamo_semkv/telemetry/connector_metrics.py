"""A connector's numbers as Prometheus metrics.

    registry(sources) -> CollectorRegistry          for Dynamo's register_engine_metrics_callback, or any exposition
    exposition(sources) -> str                      text format 0.0.4
    MetricsServer(sources, host, port)              `/metrics` from the engine process itself

A source is one rank's `SemkvConnectorScheduler.snapshot`; it is asked at each scrape, so nothing is counted twice and a
rank that is gone has no series. A source that fails shows nothing and harms no other.

Why not over the bus: what a router would export for a worker would outlive it, and Prometheus tells by a scrape that
fails that a process is gone. TensorRT-LLM runs its connector in the executor's process, which Dynamo's status server
does not reach, hence the server here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.telemetry import catalogue as c
from dynamo_semkv.telemetry import label_sets
from dynamo_semkv.telemetry.metric_spec import MetricSpec
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

Snapshot = Mapping[str, Any]
Source = Callable[[], Snapshot]
Values = dict[tuple[str, ...], float]
OTHER = "other"


class ConnectorCollector(Collector):
    """The metrics of the connectors of one process, read when they are asked for."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self.failures = 0

    def collect(self) -> Iterator[Metric]:
        """One family for each metric; a source that fails is left out and counted."""
        shots = [shot for shot in map(self._ask, self._sources) if shot is not None]
        for spec, read in _PLAIN:
            yield _family(spec, shots, read)
        for spec, key in _HISTOGRAMS:
            yield _histogram(spec, shots, key)

    def _ask(self, source: Source) -> Snapshot | None:
        try:
            shot = source()
            return shot if shot.get("dp_rank") is not None else None
        except Exception:  # noqa: BLE001 - one rank's fault may not hide the others; counted and logged
            self.failures += 1
            _throttled.exception("a connector's numbers cannot be read")
            return None


def registry(sources: Sequence[Source]) -> CollectorRegistry:
    """A Prometheus registry with the metrics of these sources only."""
    made = CollectorRegistry(auto_describe=False)
    made.register(ConnectorCollector(sources))
    return made


def exposition(sources: Sequence[Source]) -> str:
    """The metrics in Prometheus's text form."""
    return generate_latest(registry(sources)).decode()


class MetricsServer:
    """Serves on a thread of its own. OSError when the port is taken."""

    def __init__(self, sources: Sequence[Source], host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, registry(sources))
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self, timeout: float = 5.0) -> None:
        """Ends the server; waits for its thread `timeout` seconds at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout)


def _family(spec: MetricSpec, shots: Iterable[Snapshot], read: Callable[[Snapshot], Values]) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.name, spec.meaning, labels=spec.labels)
    for shot in shots:
        for labels, value in read(shot).items():
            family.add_metric((str(shot["dp_rank"]), *labels), value)
    return family


def _histogram(spec: MetricSpec, shots: Iterable[Snapshot], key: str) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.meaning, labels=spec.labels)
    for shot in shots:
        part, _, inner = key.rpartition(".")
        seconds = ((shot.get(part) or {}) if part else shot).get(inner)
        if seconds is None:
            continue
        buckets, total = [], 0
        for bound, count in zip([*seconds["bounds"], float("inf")], seconds["counts"], strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric((str(shot["dp_rank"]),), buckets=buckets, sum_value=seconds["sum"])
    return family


def _closed(counts: Mapping[str, float] | None, names: Sequence[str]) -> Values:
    """Every name of the set, from 0 on; what is in none is `other`."""
    if counts is None:
        return {}
    values: Values = {(name,): counts.get(name, 0) for name in names}
    others = sum(count for name, count in counts.items() if name not in names)
    return values | ({(OTHER,): others} if others else {})


def _one(key: str) -> Callable[[Snapshot], Values]:
    return lambda shot: {(): shot[key]} if shot.get(key) is not None else {}


def _of(part: str, key: str) -> Callable[[Snapshot], Values]:
    return lambda shot: {(): float(shot[part][key])} if shot.get(part) is not None else {}


def _info(shot: Snapshot) -> Values:
    return {(str(shot["generation"]), str(shot["materialization"]), str(shot["connector"])): 1.0}


def _outcomes(shot: Snapshot) -> Values:
    values: Values = {}
    for name, count in shot["outcomes"].items():
        outcome, _, reason = name.partition("/")
        labels = (Outcome(outcome).value, Reason(reason).value)
        values[labels] = values.get(labels, 0) + count
    return values


def _attempts(shot: Snapshot) -> Values:
    counts = shot.get("attempt_counts")
    # The token sums among them are in TOKENS, by reports.
    kept = None if counts is None else {k: n for k, n in counts.items() if not k.endswith("_tokens")}
    return _closed(kept, label_sets.ATTEMPT_EVENTS)


def _blocks(shot: Snapshot) -> Values:
    ledger = shot.get("ledger")
    return {(state,): ledger[state] for state in label_sets.BLOCK_STATES} if ledger is not None else {}


def _copied(shot: Snapshot) -> Values:
    rank = shot.get("rank")
    if rank is None:
        return {}
    return {(way,): rank["counts"].get(f"{way}_blocks", 0) for way in label_sets.COPY_EVENTS}


def _checks(shot: Snapshot) -> Values:
    rank = shot.get("rank")
    return {(result,): rank[result] for result in label_sets.CHECK_RESULTS} if rank is not None else {}


def _fetch(part: str, names: Sequence[str], skipped: Sequence[str] = ()) -> Callable[[Snapshot], Values]:
    def read(shot: Snapshot) -> Values:
        fetch = shot.get("fetch")
        return {} if fetch is None else _closed({k: n for k, n in fetch[part].items() if k not in skipped}, names)

    return read


def _fetch_blocks(shot: Snapshot) -> Values:
    fetch = shot.get("fetch")
    if fetch is None:
        return {}
    served = fetch["serving"].get("sent_blocks", 0)
    return {("pulled",): fetch["pulled_blocks"], ("served",): served, ("damaged",): fetch["damaged"]}


def _fetched_tokens(shot: Snapshot) -> Values:
    if shot.get("fetch") is None or shot.get("attempt_counts") is None:
        return {}
    return {(): shot["attempt_counts"].get("fetched_tokens", 0)}


def _reports(shot: Snapshot) -> Values:
    counts = shot["event_publisher"]
    refused = counts.get("reports_refused", 0)
    return {
        ("sent",): counts.get("reports", 0) - refused,
        ("refused",): refused,
        ("dropped",): counts.get("reports_dropped", 0),
    }


def _ranks(shot: Snapshot) -> Values:
    ranks = shot["ranks"]
    return {("expected",): ranks["world"], ("missing",): len(ranks["missing"]), ("lost",): len(ranks["lost"])}


_DISK_GAUGES = frozenset({"blocks", "waiting_to_spill", "wishes", "in_flight"})


def _disk_events(shot: Snapshot) -> Values:
    disk = shot.get("disk")
    counts = None if disk is None else {k: n for k, n in disk.items() if k not in _DISK_GAUGES}
    return _closed(counts, label_sets.DISK_EVENTS)


def _disk_holds(shot: Snapshot) -> Values:
    holds = shot.get("disk_holds")
    return {} if holds is None else _closed(holds["results"], label_sets.HOLD_RESULTS)


def _kv_events(shot: Snapshot) -> Values:
    """What was handed over, and what became of it: two counters, no name in both."""
    known = shot.get("kv_events")
    if known is None:
        return {}
    handed = {name: n for name, n in known.items() if name not in ("standing", "blocks", "waiting", "events")}
    return _closed({**known["events"], **handed}, label_sets.KV_EVENTS)


_ELSEWHERE = frozenset({"loaded_blocks", "saved_blocks", "called_leader"})


def _anomalies(shot: Snapshot) -> Values:
    rank = shot.get("rank") or {"counts": {}, "sealing_failed": 0}
    found = {
        **shot["counts"],
        **(shot.get("background") or {}),
        **{kind: count for kind, count in rank["counts"].items() if kind not in _ELSEWHERE},
        "sealing_failed": rank["sealing_failed"],
        **{kind: shot["ranks"].get(kind, 0) for kind in ("ranks_lost", "late_results")},
        "disk_failed": rank.get("disk_failed", 0),
        **{kind: shot["event_publisher"].get(kind, 0) for kind in ("residency_errors", "donors_not_restored")},
    }
    return _closed(found, label_sets.ANOMALIES)


_PLAIN: tuple[tuple[MetricSpec, Callable[[Snapshot], Values]], ...] = (
    (c.INFO, _info),
    (c.TOKENS, lambda shot: _closed(shot["tokens"], label_sets.TOKEN_STEPS)),
    (c.OUTCOMES, _outcomes),
    (c.ATTEMPTS, _attempts),
    (c.OPEN_ATTEMPTS, _one("attempts")),
    (c.TRACKED, _one("tracked")),
    (c.LEASES, _one("leases")),
    (c.OPEN_SAVES, _one("open_saves")),
    (c.COPIED_BLOCKS, _copied),
    (c.SLAB_BLOCKS, _blocks),
    (c.LEASED_BLOCKS, _of("ledger", "leased")),
    (c.EVICTED, _of("ledger", "evicted")),
    (c.EVICTED_TWINS, _of("ledger", "on_device")),
    (c.REFUSED_BLOCKS, _of("ledger", "refused")),
    (c.COLLISIONS, _of("ledger", "collisions")),
    (c.SAVES, lambda shot: _closed(shot.get("saves"), label_sets.SAVE_EVENTS)),
    (c.CHECKS, _checks),
    (c.SEALED, _of("rank", "sealed")),
    (c.PARKED, _one("parked")),
    (c.RANKS, _ranks),
    (c.RANKS_AGREE, lambda shot: {(): float(shot["ranks"]["disagreement"] is None)}),
    (c.DISK_BLOCKS, _of("disk", "blocks")),
    (c.DISK_CHANGES, _disk_events),
    (c.DISK_FILES, lambda shot: _closed((shot.get("rank") or {}).get("files"), label_sets.FILE_EVENTS)),
    (c.DISK_HOLDS, _disk_holds),
    (c.DEVICE_BLOCKS, _of("kv_events", "blocks")),
    (c.DEVICE_EVENTS, _kv_events),
    (
        c.DEVICE_STANDING,
        lambda shot: {(): float(shot["kv_events"]["standing"] == "fresh")} if shot.get("kv_events") else {},
    ),
    (c.DONORS, _one("donors")),
    (c.DONOR_CHANGES, lambda shot: _closed(shot["donor_counts"], label_sets.DONOR_EVENTS)),
    (c.HINTS, lambda shot: _closed(shot["hints"], label_sets.HINT_EVENTS)),
    (c.PULLS, _fetch("pulls", label_sets.PULL_RESULTS)),
    (c.FETCH_BLOCKS, _fetch_blocks),
    (c.FETCH_SERVING, _fetch("serving", label_sets.SERVING_EVENTS, ("sent_blocks", "sent_bytes"))),
    (c.FETCHED_TOKENS, _fetched_tokens),
    (c.REPORTS, _reports),
    (c.ANNOUNCEMENTS, lambda shot: {(): shot["event_publisher"].get("announcements", 0)}),
    (c.ANOMALIES_TOTAL, _anomalies),
    (c.FAULTS, lambda shot: _closed(shot["faults"], label_sets.CALLBACKS)),
    (c.BUS_CONNECTED, _of("bus", "connected")),
    (c.BUS_BUFFERED, _of("bus", "buffered")),
    (c.BUS_DROPPED, _of("bus", "dropped")),
    (c.BUS_RECONNECTS, _of("bus", "reconnects")),
    (c.CONNECTOR_SPANS, lambda shot: _closed(shot.get("spans"), label_sets.SPAN_STATES)),
)
_HISTOGRAMS = (
    (c.ASK_SECONDS, "ask_seconds"),
    (c.BUILD_SECONDS, "build_seconds"),
    (c.LOAD_SECONDS, "load_seconds"),
    (c.SAVE_SECONDS, "save_seconds"),
    (c.FETCH_SECONDS, "fetch.seconds"),
    (c.DISK_HOLD_SECONDS, "disk_holds.seconds"),
)
