"""The snapshot as tables of a terminal. Pure: a snapshot in, something that rich prints out.

States are told in words; colour only repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_semkv.cli import text as t
from dynamo_semkv.cli.words import DECISIONS, REASONS

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "ready": "green", "degraded": "yellow", "not_ready": "red"}


def render(snapshot: Mapping[str, Any]) -> RenderableType:
    return Group(
        _head(snapshot),
        *_spaced(
            _health(snapshot["readiness"]["checks"]),
            _funnel(snapshot),
            _outcomes(snapshot),
            _decisions(snapshot["decisions"]),
            _ttft(snapshot["ttft"]),
            _replicas(snapshot["replicas"]),
            _catalog(snapshot),
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
    table = _table("Health", "check", "state", "")
    for check in checks:
        level = str(check["level"])
        table.add_row(
            t.clean(check["name"]), Text(t.clean(level), _STYLES.get(level, "")), Text(t.clean(check["detail"]))
        )
    return table


def _funnel(s: Mapping[str, Any]) -> Group:
    table = _table("Funnel", "step", ">tokens", ">of input", ">requests")
    for row in s["funnel"]:
        style = "bold" if row["step"] == "materialized" else ""
        cells = (t.clean(row["step"]), t.count(row["tokens"]), t.percent(row["share"]), t.count(row["requests"]))
        table.add_row(*(Text(cell, style) for cell in cells))
    beside = s["beside"]
    notes = [
        "Only materialized is reuse: the backend confirmed it. "
        f"Confirmed without a hint: {t.count(beside['unhinted_tokens'])} tokens; "
        f"held by the engines themselves: {t.count(beside['local_tokens'])}."
    ]
    if s["would_have"]["routes"]:
        notes.append(
            f"Not acted on: {t.count(s['would_have']['routes'])} routes would have been placed, "
            f"{t.count(s['would_have']['agreed'])} of them where Dynamo sent them."
        )
    return Group(table, Text("\n".join(notes), "dim"))


def _outcomes(s: Mapping[str, Any]) -> RenderableType:
    table = _table("Outcomes", "outcome", "reason", "", ">routes")
    for row in s["outcomes"]:
        table.add_row(*_texts(row["outcome"], row["reason"], REASONS.get(row["reason"], "")), t.count(row["routes"]))
    for row in s["orphans"]:
        table.add_row(
            *_texts("orphan report", row["reason"], "A report that belongs to no open route"), t.count(row["reports"])
        )
    return table if table.row_count else Text("No route has closed yet.")


def _decisions(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = _table("Decisions", "reason", "", ">routes")
    for row in rows:
        table.add_row(*_texts(row["reason"], DECISIONS.get(row["reason"], "")), t.count(row["routes"]))
    return table if table.row_count else Text("No decision yet.")


def _ttft(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Time to first token", "class", ">median", ">95 %", ">routes")
    for row in rows:
        times = (t.seconds(row["median_seconds"]), t.seconds(row["p95_seconds"]))
        table.add_row(Text(t.clean(row["class"])), *times, t.count(row["count"]))
    return table


def _replicas(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not rows:
        return Text("No replica.")
    table = _table(
        "Replicas", "replica", "standing", ">placed", ">served", ">confirmed", ">declined", ">queued", ">in host"
    )
    for row in rows:
        standing = t.clean(row.get("standing")) if row["live"] else "gone"
        counts = (row["placed_requests"], row["served_requests"], row["confirmed_tokens"], row["declined_requests"])
        now = (row.get("queued_prefill_tokens"), row.get("resident_blocks"))
        table.add_row(*_texts(row["name"], standing), *(t.count(value) for value in (*counts, *now)))
    table.caption = "placed, served, declined: requests; confirmed, queued: tokens; in host: blocks"
    table.caption_justify = "left"
    return table


def _catalog(s: Mapping[str, Any]) -> Text:
    streams = s["catalog"].get("streams", ())
    fenced = sum(bool(row["quarantined"]) for row in streams)
    absent = sum(bool(row["absent"]) and not row["quarantined"] for row in streams)
    dropped = s["publisher"]["dropped"] if s["publisher"] is not None else None
    return Text(
        f"Catalog: {t.count(s['catalog'].get('donors'))} donors on {len(streams)} streams, {fenced} quarantined, "
        f"{absent} absent. Bus: {t.count(dropped)} messages dropped."
    )


def _texts(*values: object) -> list[Text]:
    """Text, not markup: a name with brackets in it stays a name."""
    return [Text(t.clean(value)) for value in values]


def _table(title: str, *columns: str) -> Table:
    """`>name` is a column of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table
