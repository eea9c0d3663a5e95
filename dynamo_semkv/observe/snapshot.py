"""The snapshot: a RouterState as JSON, for the page and for `status`.

    build_snapshot(state) -> dict        explain(route) -> dict

Ids are strings (they exceed 2^53), unknown numbers are null, no number is NaN. Neither result holds a prompt, a token
id, a salt or a key over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from dynamo_semkv import __version__
from dynamo_semkv.contracts.route_events import MAX_CLIENT_TEXT
from dynamo_semkv.observe.dynamo_counters import DynamoTokens
from dynamo_semkv.observe.health import readiness, wire_ids
from dynamo_semkv.observe.state import ReplicaStatus, RouterState, StreamStatus, stream_states
from dynamo_semkv.outcome.closed import ClosedRoute, placed_on
from dynamo_semkv.outcome.history import BUCKET_SECONDS, History
from dynamo_semkv.outcome.totals import STEPS, ReplicaTotals, Totals, TtftSample

SCHEMA = 1
MAX_REPLICA_ROWS = 256
MAX_SAFE_INTEGER = 2**53 - 1
_MAX_TEXT = 256
_MAX_DEPTH = 8


def build_snapshot(state: RouterState) -> dict[str, Any]:
    """The whole state, JSON-able. Its keys are what page, `status` and `doctor` read; SCHEMA counts their versions."""
    snapshot = {
        "schema": SCHEMA,
        "version": __version__,
        **_process(state),
        **_traffic(state),
        "replicas": _replicas(state.replicas, state.totals.replicas),
        "course": {
            "bucket_seconds": BUCKET_SECONDS,
            "start": [bucket.start for bucket in state.course],
            "requests": [bucket.requests for bucket in state.course],
            **{step: [bucket.tokens[step] for bucket in state.course] for step in STEPS},
        },
        "recent": [route_row(route) for route in sorted(state.recent, key=_newest_first)],
        "publisher": asdict(state.publisher) if state.publisher is not None else None,
        "subscriber": asdict(state.subscriber) if state.subscriber is not None else None,
        "streams": [_stream(stream) for stream in state.streams],
        "catalog": {
            **state.catalog,
            "streams": _donor_streams(state),
            "stream_states": stream_states(state.catalog),
        },
        "providers": state.providers,
        "calibration": state.calibration,
        "book": asdict(state.book),
        "fallbacks": {str(getattr(name, "value", name)): count for name, count in state.fallbacks.items()},
    }
    plain: dict[str, Any] = to_plain(snapshot)
    return plain


def _process(state: RouterState) -> dict[str, Any]:
    """Which router this is, what it runs, and whether it is ready."""
    return {
        "now": state.now,
        "since": state.since,
        "uptime_seconds": state.uptime_seconds,
        "router": state.router,
        "mode": state.mode,
        "canary_percent": state.canary_percent,
        "models": sorted({replica.model for replica in state.replicas if replica.model is not None}),
        "config_hash": state.config_hash,
        "reloaded_at": state.configuration.get("reloaded_at"),
        "last_reload_error": state.configuration.get("last_reload_error"),
        "restart_needed": state.configuration.get("restart_needed", []),
        "replayed": state.replayed,
        "readiness": readiness(state).plain(),
    }


def _traffic(state: RouterState) -> dict[str, Any]:
    """What was decided, what became of it and what it saved, over all routes that are counted."""
    totals = state.totals
    denominator = totals.funnel.tokens["input"]
    return {
        "requests": totals.requests,
        "open_routes": state.open_routes,
        "held_reports": state.held_reports,
        "history_size": state.history_size,
        "funnel": _funnel(totals),
        "beside": {
            "confirmed_tokens": totals.confirmed_tokens,
            "unhinted_tokens": totals.unhinted_tokens,
            "exact_device_tokens": totals.exact_device_tokens,
            "exact_host_tokens": totals.exact_host_tokens,
            "local_tokens": totals.local_tokens,
            "engine_cached_tokens": totals.engine_cached_tokens,
        },
        "outcomes": [
            {"outcome": outcome, "reason": reason, "routes": routes}
            for (outcome, reason), routes in sorted(totals.outcomes.items(), key=lambda item: (-item[1], item[0]))
        ],
        "orphans": _ranked(totals.orphans, "reason", "reports"),
        "decisions": _ranked(totals.decisions, "reason", "routes"),
        "lookups": dict(totals.lookups),
        "modes": dict(totals.modes),
        "ends": dict(totals.ends),
        "joined_by": dict(totals.joined_by),
        "cross_checks": dict(totals.cross_checks),
        "would_have": {
            "routes": totals.would_have,
            "agreed": totals.would_have_agreed,
            "tokens": totals.would_have_tokens,
            "share": totals.would_have_tokens / denominator if denominator else None,
        },
        "dynamo": _dynamo(state.dynamo),
        "ttft": [_ttft(name, sample) for name, sample in totals.ttft.items()],
    }


def _ttft(name: str, sample: TtftSample) -> dict[str, Any]:
    return {
        "class": name,
        "count": sample.count,
        "mean_seconds": sample.sum_seconds / sample.count if sample.count else None,
        "median_seconds": sample.quantile(0.5),
        "p95_seconds": sample.quantile(0.95),
    }


def route_row(route: ClosedRoute) -> dict[str, Any]:
    """One line of the list of recent routes."""
    opened, observed, funnel = route.opened, route.observed, route.funnel
    return {
        "route_id": route.route_id,
        "request_id": opened.request_id,
        "attempt": opened.attempt,
        "opened_at": opened.opened_at,
        "model": opened.model,
        "mode": opened.mode,
        "decision": opened.decision_reason,
        "outcome": route.outcome.value,
        "reason": route.reason.value,
        "placed_on": _name(placed_on(opened)),
        "served_by": _name(route.replica),
        "tokens": {**{step: getattr(funnel, step) for step in STEPS}, "unhinted": funnel.unhinted},
        "ttft_seconds": observed.ttft_seconds if observed is not None else None,
        "ttft_class": route.ttft_class.value if route.ttft_class is not None else None,
        "saved_seconds": route.saving.saved_seconds if route.saving is not None else None,
    }


def explain(route: ClosedRoute) -> dict[str, Any]:
    """Everything that is known of one route: what was decided, what the router saw, what the backend reported."""
    opened: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(route.opened, prompt_key=b"", tenant=None))
    report: dict[str, Any] | None = None
    if route.report is not None:
        report = msgspec.to_builtins(msgspec.structs.replace(route.report, prompt_key=b""))
        report.pop("prompt_key")
    for key in ("prompt_key", "tenant"):
        opened.pop(key)
    plain: dict[str, Any] = to_plain(
        {
            **route_row(route),
            "joined_by": route.joined_by.value,
            "cross_check": route.cross_check.value,
            "closed_at": route.closed_at,
            "saving": asdict(route.saving) if route.saving is not None else None,
            "opened": opened,
            "observed": msgspec.to_builtins(route.observed) if route.observed is not None else None,
            "report": report,
        }
    )
    return plain


def explain_request(history: History, asked: str) -> list[dict[str, Any]]:
    """The attempts of a request, by the id that its user has (with `chatcmpl-`, or without), or by a route id. Empty
    for an id that is unknown or not closed yet. Clients choose request ids, so several tenants may use one: `request`
    numbers the request that a route is an attempt of, `requests` is how many have this id."""
    asked = asked.removeprefix("chatcmpl-")[:MAX_CLIENT_TEXT]
    found = history.of_request(asked)
    if not found and (route := history.get(asked)) is not None:
        found = [[route]]
    return [
        {**explain(route), "request": number, "requests": len(found)}
        for number, attempts in enumerate(found, start=1)
        for route in attempts
    ]


def to_plain(value: object, depth: int = 0) -> Any:
    """The value as JSON allows it, whatever a provider put into its state: too large integers and unknown types become
    text, NaN becomes null."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) <= MAX_SAFE_INTEGER else str(int(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        text = str(getattr(value, "value", value))
        return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {to_plain(str(getattr(key, "value", key))): to_plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
            return [to_plain(item, depth + 1) for item in value]
    return to_plain(type(value).__name__)


def _funnel(totals: Totals) -> list[dict[str, Any]]:
    denominator = totals.funnel.tokens["input"]
    return [
        {
            "step": step,
            "tokens": totals.funnel.tokens[step],
            "requests": totals.funnel.requests[step],
            "share": totals.funnel.tokens[step] / denominator if denominator else None,
        }
        for step in STEPS
    ]


def _dynamo(tokens: DynamoTokens | None) -> dict[str, Any] | None:
    """The counters of this router since its start, with a denominator of their own."""
    if tokens is None:
        return None
    denominator = tokens.input_tokens
    steps = {
        "best_eligible": tokens.best_eligible_tokens,
        "selected": tokens.selected_tokens,
        "worker_reused": tokens.worker_reused_tokens,
    }
    return {
        "input_tokens": denominator,
        "steps": [
            {"step": step, "tokens": count, "share": count / denominator if denominator else None}
            for step, count in steps.items()
        ],
    }


def _stream(stream: StreamStatus) -> dict[str, Any]:
    """The counts alone: readiness names the version."""
    return {name: value for name, value in asdict(stream).items() if name != "unsupported"}


def _donor_streams(state: RouterState) -> list[dict[str, Any]]:
    """Streams that need attention come first. `replica`: the name of the live replica whose stream it is; null when
    none is."""
    names: dict[tuple[str, int], str] = {}
    for replica in state.replicas:
        for worker_id in wire_ids(replica):
            names[worker_id, replica.dp_rank] = replica.name
    rows = [
        {**row, "replica": names.get((str(row["worker_id"]), row["dp_rank"]))}
        for row in state.catalog.get("streams", ())
    ]
    rows.sort(key=lambda row: (not row["quarantined"], not row["absent"], row["replica"] or "", str(row["worker_id"])))
    return rows[:MAX_REPLICA_ROWS]


def _replicas(live: Iterable[ReplicaStatus], totals: Mapping[str, ReplicaTotals]) -> list[dict[str, Any]]:
    """Live replicas first, then those that only history knows. Totals belong to a name: where two instances carry one
    name, the first row has the totals."""
    rows: list[dict[str, Any]] = []
    shown: set[str] = set()
    for status in sorted(live, key=lambda status: (status.name, status.worker_id)):
        counted = ReplicaTotals() if status.name in shown else totals.get(status.name, ReplicaTotals())
        shown.add(status.name)
        row = {"name": status.name, "live": True, **asdict(counted), **asdict(status)}
        rows.append({**row, "worker_id": str(status.worker_id)})
    gone = sorted(totals.keys() - shown)
    return [*rows, *({"name": name, "live": False, **asdict(totals[name])} for name in gone)][:MAX_REPLICA_ROWS]


def _ranked(counts: Mapping[str, int], key: str, value: str) -> list[dict[str, Any]]:
    return [{key: name, value: count} for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _newest_first(route: ClosedRoute) -> tuple[float, str]:
    """Orders by the time of opening: pairs settle in groups, so the order of closing says little."""
    return -route.opened.opened_at, route.route_id


def _name(replica: object | None) -> str | None:
    return str(replica) if replica is not None else None
