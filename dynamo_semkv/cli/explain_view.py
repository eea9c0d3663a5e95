"""Renders one route as the page does: what was found, decided, reported by the backend, and seen on the stream.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_semkv.cli import text as t
from dynamo_semkv.cli.words import CROSS_CHECKS, DECISIONS, ENDS, REASONS
from dynamo_semkv.contracts.route_events import ADVISED

SHEET_PARTS = ("device", "host", "disk", "donor", "load", "decode", "extra", "total")


def render(route: Mapping[str, Any]) -> RenderableType:
    """One closed route, as `/api/routes/ID` has it, for rich to print. A field that is missing raises LookupError or
    TypeError."""
    head = Text(f"Route {t.clean(route['route_id'])}: {t.clean(route['outcome'])}, {t.clean(route['reason'])}", "bold")
    story = Table.grid(padding=(0, 2))
    story.add_column(style="bold", no_wrap=True)
    story.add_column(overflow="fold")
    for name, sentences in (
        ("Because", _because(route)),
        ("Request", _request(route)),
        ("Evidence", _evidence(route)),
        ("Decision", _decision(route)),
    ):
        story.add_row(Text(f"  {name}"), Text("\n".join(sentences)))
    if route["opened"].get("sheet"):
        story.add_row(Text("  Sheet"), _sheet(route["opened"]))
    for name, sentences in (("Backend", _backend(route)), ("Stream", _stream(route))):
        story.add_row(Text(f"  {name}"), Text("\n".join(sentences)))
    return Group(head, story, Text())


def _because(route: Mapping[str, Any]) -> Iterator[str]:
    yield f"{REASONS.get(route['reason'], t.clean(route['reason']))}."


def _request(route: Mapping[str, Any]) -> Iterator[str]:
    opened = route["opened"]
    yield (
        f"{t.count(route['tokens']['input'])} prompt tokens for {t.clean(route['model'])}, "
        f"{t.time(route['opened_at'])}, request {t.clean(route['request_id'])}, attempt {route['attempt']}."
    )
    if route.get("requests", 1) > 1:
        yield f"It is request {route['request']} of {route['requests']} of several tenants whose clients chose this id."
    yield (
        f"Dynamo's exact overlap: {t.count(opened['exact_device_tokens'])} tokens on the device, "
        f"{t.count(opened['exact_host_tokens'])} more in host memory."
    )


def _evidence(route: Mapping[str, Any]) -> Iterator[str]:
    opened = route["opened"]
    yield f"Lookup: {t.clean(opened['lookup'])} in {t.seconds(opened['lookup_seconds'])}."
    if opened["donor_id"] is None:
        found = (
            "What was found saves nothing beyond what its replica holds on the device, or sits where nobody may be "
            "sent."
        )
        yield found if opened["lookup"] == "hit" else "No donor."
        return
    yield (
        f"Donor {t.clean(opened['donor_id'])} ({t.clean(opened['match_type'])}, overlap {t.clean(opened['overlap'])}, "
        f"tier {t.clean(opened['tier'])}, by {t.clean(opened['provider'])}): {t.count(route['tokens']['evidence'])} "
        "tokens."
    )
    signals = opened.get("quality_signals") or {}
    if signals:
        yield f"The provider's signals: {', '.join(f'{t.clean(name)} {t.clean(n)}' for name, n in signals.items())}."


def _decision(route: Mapping[str, Any]) -> Iterator[str]:
    words = DECISIONS.get(route["decision"], t.clean(route["decision"]))
    where = ""
    if route["placed_on"] is not None:
        tokens = route["tokens"]
        where = (
            f", on {t.clean(route['placed_on'])}: {t.count(tokens['placed'])} tokens, {t.count(tokens['hinted'])} of "
            "them hinted"
        )
        if route["opened"].get("expected_tokens") is not None:
            where += f"; {t.count(route['opened']['expected_tokens'])} tokens of prefill expected to be saved"
    elif route["opened"]["shadow_choice"] is not None:
        where = f", on {t.clean(route['opened']['shadow_choice'])}"
    yield f"Mode {t.clean(route['mode'])}. {words} ({t.clean(route['decision'])}){where}."


def _sheet(opened: Mapping[str, Any]) -> RenderableType:
    """The score sheet: tokens of prefill expected to be saved, by what they come from."""
    lines = opened["sheet"]
    parts = [part for part in SHEET_PARTS if part == "total" or any(line.get(part) for line in lines)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("tokens expected to be saved", no_wrap=True)
    for part in parts:
        table.add_column(part, justify="right")
    table.add_column("")
    for line in lines:
        notes = ["what Dynamo's router would choose"] if line["replica"] == opened.get("dynamo_choice") else []
        if line.get("filtered_by"):
            notes.append(f"might not be chosen: {t.clean(line['filtered_by'])}")
        counts = [f"{line.get(part, 0):,}" for part in parts]
        table.add_row(Text(t.clean(line["replica"])), *counts, Text(", ".join(notes)))
    left = opened.get("sheet_rows", 0) - len(lines)
    return Group(table, Text(f"and {left:,} more")) if left > 0 else table


def _backend(route: Mapping[str, Any]) -> Iterator[str]:
    report = route["report"]
    if report is None:
        yield "No report: nothing is counted as reuse."
        return
    took = f" in {t.seconds(report['load_seconds'])}" if report["load_seconds"] is not None else ""
    yield (
        f"{t.clean(report['stable_routing_id'])}/{report['dp_rank']} held {t.count(report['local_tokens'])} tokens "
        f"itself. Offered {t.count(report['offered'])}, honoured {t.count(report['honoured'])}, copied "
        f"{t.count(report['copied'])}, confirmed {t.count(report['confirmed'])}{took}."
    )
    if report["differing_field"]:
        yield f"Namespaces differ in {t.clean(report['differing_field'])}."
    if route["tokens"]["unhinted"]:
        yield f"{t.count(route['tokens']['unhinted'])} of the confirmed tokens were not hinted."
    yield f"Joined by {t.clean(route['joined_by']).replace('_', ' ')}."


def _stream(route: Mapping[str, Any]) -> Iterator[str]:
    observed = route["observed"]
    if observed is None:
        yield "Its end was never published: its router went away."
        return
    if observed["end"] == ADVISED:
        yield "A gateway dispatched it by our advice: no token passed through us, so first token and end are not known."
    else:
        kind = f" ({t.clean(route['ttft_class'])})" if route["ttft_class"] is not None else ""
        yield (
            f"{ENDS.get(observed['end'], t.clean(observed['end']))} on {t.clean(route['served_by'])}: first token "
            f"after {t.seconds(observed['ttft_seconds'])}{kind}, {t.count(observed['output_tokens'])} tokens out."
        )
    if (saving := route.get("saving")) is not None and saving["saved_seconds"] is not None:
        less = saving["saved_seconds"] >= 0.0
        yield (
            f"At this replica's cold rate ({t.count(round(1.0 / saving['seconds_per_token']))} tokens a second) it "
            f"would have taken {t.seconds(saving['cold_seconds'])}: {t.seconds(abs(saving['saved_seconds']))} "
            f"{'saved' if less else 'lost'}."
        )
    if observed["engine_cached_tokens"] is not None:
        compared = CROSS_CHECKS.get(route["cross_check"], t.clean(route["cross_check"]))
        yield f"The engine counts {t.count(observed['engine_cached_tokens'])} cached tokens: {compared}."
