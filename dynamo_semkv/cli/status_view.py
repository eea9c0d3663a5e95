"""Renders the snapshot as tables of a terminal. Pure: takes a snapshot, returns what rich prints.

States are written as words; colour only repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_semkv.cli import text as t
from dynamo_semkv.cli.sources_view import sources
from dynamo_semkv.cli.tables import make_table, texts
from dynamo_semkv.cli.words import DECISIONS, REASONS

RECENT = 5
"""Routes in the last table; `explain --last` shows more of them."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "ready": "green", "degraded": "yellow", "not_ready": "red"}


def render(snapshot: Mapping[str, Any]) -> RenderableType:
    """All of a snapshot, for rich to print. A field that is missing raises LookupError or TypeError."""
    return Group(
        _head(snapshot),
        *_spaced(
            _health(snapshot["readiness"]["checks"]),
            _funnel(snapshot),
            _dynamo(snapshot),
            _outcomes(snapshot),
            _decisions(snapshot),
            _ttft(snapshot["ttft"]),
            _replicas(snapshot["replicas"]),
            *sources(snapshot),
            _recent(snapshot["recent"]),
        ),
    )


def _spaced(*parts: RenderableType) -> Iterable[RenderableType]:
    for part in parts:
        yield Text()
        yield part


def _head(s: Mapping[str, Any]) -> Text:
    state = str(s["readiness"]["state"])
    mode = f"canary {s['canary_percent']:g} %" if s["mode"] == "canary" else t.clean(s["mode"])
    head = Text.assemble(
        (t.clean(s["router"]), "bold"),
        " is ",
        (t.clean(state.replace("_", " ")), _STYLES.get(state, "")),
        f", mode {mode}, configuration {t.clean(s['config_hash'])}, up {t.duration(s['uptime_seconds'])}\n",
    )
    models = ", ".join(t.clean(model) for model in s["models"]) or "no model yet"
    since = "no route yet" if s["since"] is None else f"routes since {t.time(s['since'])}"
    head.append(f"{models}; {since}; {t.count(s['requests'])} closed, {t.count(s['open_routes'])} open")
    return head


def _health(checks: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("Health", "check", "state", "")
    for check in checks:
        level = str(check["level"])
        table.add_row(
            t.clean(check["name"]), Text(t.clean(level), _STYLES.get(level, "")), Text(t.clean(check["detail"]))
        )
    return table


def _funnel(s: Mapping[str, Any]) -> Group:
    table = make_table("Funnel", "step", ">tokens", ">of input", ">requests")
    for row in s["funnel"]:
        style = "bold" if row["step"] == "materialized" else ""
        cells = (t.clean(row["step"]), t.count(row["tokens"]), t.percent(row["share"]), t.count(row["requests"]))
        table.add_row(*(Text(cell, style) for cell in cells))
    beside = s["beside"]
    notes = [
        "Only materialized is reuse: the backend confirmed it. Confirmed without a hint: "
        f"{t.count(beside['unhinted_tokens'])} tokens; held by the engines themselves: "
        f"{t.count(beside['local_tokens'])}."
    ]
    if s["would_have"]["routes"]:
        notes.append(
            f"Not acted on: {t.count(s['would_have']['routes'])} routes would have been placed, "
            f"{t.count(s['would_have']['agreed'])} of them where Dynamo sent them: "
            f"{t.count(s['would_have']['tokens'])} tokens, {t.percent(s['would_have']['share'])} of input."
        )
    return Group(table, Text("\n".join(notes), "dim"))


def _outcomes(s: Mapping[str, Any]) -> RenderableType:
    table = make_table("Outcomes", "outcome", "reason", "", ">routes")
    for row in s["outcomes"]:
        table.add_row(*texts(row["outcome"], row["reason"], REASONS.get(row["reason"], "")), t.count(row["routes"]))
    for row in s["orphans"]:
        table.add_row(
            *texts("orphan report", row["reason"], "A report that belongs to no open route"), t.count(row["reports"])
        )
    return table if table.row_count else Text("No route has closed yet.")


def _dynamo(s: Mapping[str, Any]) -> RenderableType:
    found = s["dynamo"]
    if found is None:
        return Text("Dynamo's own counters: not known (DYN_SYSTEM_PORT is not set, or nothing was routed yet).")
    table = make_table("Dynamo's own counters", "", ">tokens", ">of routed")
    for row in found["steps"]:
        table.add_row(t.clean(row["step"]).replace("_", " "), t.count(row["tokens"]), t.percent(row["share"]))
    note = (
        f"Of {t.count(found['input_tokens'])} prompt tokens that this router sent since its start; the funnel is of "
        f"all routers. Engines count {t.count(s['beside']['engine_cached_tokens'])} cached tokens over the routes of "
        "the funnel."
    )
    return Group(table, Text(note, "dim"))


def _decisions(s: Mapping[str, Any]) -> RenderableType:
    table = make_table("Decisions", "reason", "", ">routes")
    for row in s["decisions"]:
        table.add_row(*texts(row["reason"], DECISIONS.get(row["reason"], "")), t.count(row["routes"]))
    if not table.row_count:
        return Text("No decision yet.")
    lookups = sorted(s["lookups"].items(), key=lambda item: (-item[1], item[0]))
    return Group(table, Text(f"Lookups: {', '.join(f'{t.clean(name)} {t.count(count)}' for name, count in lookups)}."))


def _ttft(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("Time to first token", "class", ">median", ">95 %", ">routes")
    for row in rows:
        times = (t.seconds(row["median_seconds"]), t.seconds(row["p95_seconds"]))
        table.add_row(Text(t.clean(row["class"])), *times, t.count(row["count"]))
    return table


def _replicas(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not rows:
        return Text("No replica.")
    table = make_table(
        "Replicas", "replica", "standing", ">placed", ">served", ">confirmed", ">declined", ">queued", ">in host"
    )
    for row in rows:
        standing = t.clean(row.get("standing")) if row["live"] else "gone"
        counts = (row["placed_requests"], row["served_requests"], row["confirmed_tokens"], row["declined_requests"])
        now = (row.get("queued_prefill_tokens"), row.get("resident_blocks"))
        table.add_row(*texts(row["name"], standing), *(t.count(value) for value in (*counts, *now)))
    table.caption = "placed, served, declined: requests; confirmed, queued: tokens; in host: blocks"
    table.caption_justify = "left"
    return table


def _recent(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = make_table("Last routes", "route", "outcome", "reason", ">placed", ">materialized", ">ttft")
    for row in rows[:RECENT]:
        tokens = row["tokens"]
        counts = (tokens["placed"], tokens["materialized"])
        table.add_row(
            *texts(str(row["route_id"])[:8], row["outcome"], row["reason"]),
            *(t.count(value) for value in counts),
            t.seconds(row["ttft_seconds"]),
        )
    return table if table.row_count else Text("No route to list.")
