"""The demo's tables for a terminal of 80 columns, and the ratios below them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dynamo_semkv.bench.scenarios import Scenario
from dynamo_semkv.bench.table import Row

ALL = "all"


def print_tables(console: Console, table: Sequence[Row], scenarios: Sequence[Scenario]) -> None:
    """Prints both tables and the summary; `table` must have a row for each scenario and one named `ALL`."""
    titles = {scenario.name: scenario.name.replace("_", " ") for scenario in scenarios} | {ALL: ALL}
    console.print(tokens_table(table, titles))
    console.print(reasons_table(table, titles))
    for line in summary(table):
        console.print(line, highlight=False)


def tokens_table(table: Sequence[Row], titles: dict[str, str]) -> Table:
    """Tokens from placement to materialization, a row a scenario; `titles` by scenario."""
    view = _table("Placement against materialization, in tokens")
    for header in ("req", "input", "device", "evidence", "placed", "hinted", "materialized"):
        view.add_column(header, justify="right", no_wrap=True)
    for row in table:
        if row.scenario == ALL:
            view.add_section()
        counts = (row.input, row.local, row.evidence, row.placed, row.hinted, row.materialized)
        view.add_row(titles[row.scenario], f"{row.requests}", *(f"{n:,}" for n in counts))
    return view


def reasons_table(table: Sequence[Row], titles: dict[str, str]) -> Table:
    """Why requests were not placed or not loaded, and times to first token, a row a scenario."""
    view = _table("Why not, and time to first token (median, ms)")
    view.add_column("left to Dynamo", overflow="fold", max_width=18)
    view.add_column("not loaded", overflow="fold", max_width=18)
    for header in ("cold", "warm", "loaded"):
        view.add_column(header, justify="right")
    for row in table:
        if row.scenario == ALL:
            view.add_section()
        times = (milliseconds(t) for t in (row.ttft_cold, row.ttft_warm, row.ttft_loaded))
        view.add_row(titles[row.scenario], reasons(row.left), reasons(row.declines), *times)
    return view


def _table(title: str) -> Table:
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    view.add_column("scenario", overflow="fold", max_width=22)
    return view


def summary(table: Sequence[Row]) -> list[str]:
    """The sentences below the tables, without those whose figures were not measured."""
    by_name = {row.scenario: row for row in table}
    everything = by_name[ALL]
    lines = [f"{everything.failed} of {everything.requests} requests failed"] if everything.failed else []
    if everything.ttft_cold:
        for name, value in (("loaded from host", everything.ttft_loaded), ("warm on device", everything.ttft_warm)):
            if value:
                lines.append(f"TTFT {name} / cold: {value / everything.ttft_cold:.2f}")
    if everything.input:
        share = everything.materialized / everything.input
        lines.append(
            f"Confirmed by the backend as materialized: {everything.materialized:,} tokens, {share:.1%} of the input"
        )
    for name, title in (("negative", "Negative controls"), ("tenants", "Across tenants")):
        if name in by_name:
            row = by_name[name]
            lines.append(f"{title}: {row.placed:,} tokens placed, {row.materialized:,} materialized")
    return lines


def reasons(counted: Sequence[tuple[str, int]]) -> str:
    """Reasons with their counts on one line; a dash for none."""
    return ", ".join(f"{reason} {count}" for reason, count in counted) or "-"


def milliseconds(seconds: float | None) -> str:
    """Seconds as whole milliseconds; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1000:,.0f}"
