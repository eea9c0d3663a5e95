"""The table on a terminal, and the ratios that it is about."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dynamo_semkv.bench.scenarios import Scenario
from dynamo_semkv.bench.table import Row


def print_table(console: Console, table: Sequence[Row], scenarios: Sequence[Scenario]) -> None:
    titles = {scenario.name: (scenario.title, scenario.expects) for scenario in scenarios} | {"all": ("all", "")}
    view = Table(title="Placement against materialization (tokens; TTFT: median ms)", title_justify="left")
    view.add_column("scenario", overflow="fold", min_width=18)
    for header in ("requests", "input", "on device", "evidence", "placed", "hinted", "materialized"):
        view.add_column(header, justify="right")
    view.add_column("declined because", overflow="fold", min_width=16)
    for header in ("cold", "warm", "loaded"):
        view.add_column(header, justify="right")
    for row in table:
        if row.scenario == "all":
            view.add_section()
        view.add_row(
            titles[row.scenario][0],
            f"{row.requests}" + (f" ({row.failed} failed)" if row.failed else ""),
            *(f"{n:,}" for n in (row.input, row.local, row.evidence, row.placed, row.hinted, row.materialized)),
            ", ".join(f"{reason} {count}" for reason, count in row.declines) or "-",
            *(milliseconds(t) for t in (row.ttft_cold, row.ttft_warm, row.ttft_loaded)),
        )
    console.print(view)
    for line in summary(table):
        console.print(line)


def summary(table: Sequence[Row]) -> list[str]:
    """The sentences under the table; only what was measured."""
    by_name = {row.scenario: row for row in table}
    everything = by_name["all"]
    lines = []
    if everything.ttft_cold and everything.ttft_loaded:
        ratio = everything.ttft_loaded / everything.ttft_cold
        lines.append(f"TTFT loaded from host / cold: {ratio:.2f}")
    if everything.ttft_cold and everything.ttft_warm:
        lines.append(f"TTFT warm on device / cold: {everything.ttft_warm / everything.ttft_cold:.2f}")
    if everything.input:
        share = everything.materialized / everything.input
        lines.append(f"Backend-confirmed materialized tokens: {everything.materialized:,} ({share:.1%} of the input)")
    negative = by_name.get("negative")
    if negative is not None:
        lines.append(f"Negative controls: {negative.placed} tokens placed, {negative.materialized} materialized")
    tenants = by_name.get("tenants")
    if tenants is not None:
        lines.append(f"Across tenants: {tenants.placed} tokens placed, {tenants.materialized} materialized")
    return lines


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f}"
