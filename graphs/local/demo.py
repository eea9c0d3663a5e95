"""The demo: starts the local graph, sends a real workload through Dynamo's frontend, and prints tables of placement
against materialization."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynamo_semkv.bench.client import Answer, ChatClient
from dynamo_semkv.bench.scenarios import Scenario
from dynamo_semkv.bench.scenarios import demo as demo_scenarios
from dynamo_semkv.bench.table import RouteFacts, Row, rows
from graphs.local.graph import LocalGraph
from graphs.local.settings import GraphSettings
from graphs.local.table_view import print_tables

REPORT_SECONDS = 40.0
"""Longer than a route waits for its report, so that every route has closed, with a report or as unconfirmed."""


def run(settings: GraphSettings, *, keep: bool, run_dir: Path | None, model_dir: Path) -> int:
    """Exit status 0 if every request was served. With `keep` the graph stays up until Ctrl-C."""
    console = Console()
    graph = LocalGraph(settings, run_dir=run_dir, model_dir=model_dir)
    started = time.monotonic()
    bring_up(graph, console)
    clean = False
    try:
        console.print(
            f"Up in {time.monotonic() - started:.0f} s. Frontend {graph.frontend_url}, page {graph.page_url()}"
        )
        scenarios = demo_scenarios()
        asked = time.monotonic()
        table, answers = asyncio.run(measure(graph, scenarios, console))
        took = time.monotonic() - asked
        print_tables(console, table, scenarios)
        for line in (trouble := graph.trouble())[:20]:
            console.print(line, style="red", markup=False)
        failed = [a for _, a in answers if not a.ok]
        for answer in failed[:5]:
            console.print(f"a request failed: {answer.error}", style="red", markup=False)
        console.print(f"{len(answers)} requests in {took:.0f} s, {len(failed)} failed, {len(trouble)} errors logged")
        clean = not failed and not trouble
        if keep:
            wait_for_interrupt(graph, console)
        return 0 if clean else 1
    finally:
        graph.down(keep_logs=not clean)
        if not clean:
            console.print(f"logs: {graph.run_dir}", markup=False)


def bring_up(graph: LocalGraph, console: Console) -> None:
    """Calls `graph.up()` and shows what it starts: on a terminal in one line that changes, else in a line each.
    GraphError as `up`."""
    settings = graph.settings
    console.print(
        f"Starting {settings.workers} workers x {settings.data_parallel_size} ranks, model {settings.served_model} ..."
    )
    if not console.is_terminal:
        graph.up(lambda part: console.print(f"Starting: {part}", markup=False))
        return
    with console.status("starting") as status:
        graph.up(lambda part: status.update(f"starting: {part}"))


def print_where(graph: LocalGraph, console: Console) -> None:
    """Prints what one needs to look into a running graph and to change it."""
    for name, value in (
        ("Mode", graph.settings.mode),
        ("Configuration", graph.config_path),
        ("Logs", graph.run_dir),
        ("Bus", graph.urls["nats"]),
    ):
        # Never wrapped: these are lines to copy from.
        console.print(f"{name + ':':<15}{value}", markup=False, highlight=False, soft_wrap=True)


def wait_for_interrupt(graph: LocalGraph, console: Console) -> None:
    """Prints where everything is and returns after Ctrl-C."""
    console.print(
        f"\nThe graph stays up. Page: [link]{graph.page_url()}[/link]   Frontend: {graph.frontend_url}   Ctrl-C ends "
        "it."
    )
    print_where(graph, console)
    print_beside(graph, console)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("stopping")


def print_beside(graph: LocalGraph, console: Console) -> None:
    """Prints where Prometheus and Grafana are, and what is missing."""
    for name in ("prometheus", "grafana"):
        if name in graph.urls:
            console.print(f"{name.capitalize()}: [link]{graph.urls[name]}[/link]")
    for note in graph.notes:
        console.print(note, style="yellow", markup=False)


async def measure(
    graph: LocalGraph, scenarios: Sequence[Scenario], console: Console
) -> tuple[list[Row], list[tuple[str, Answer]]]:
    """Sends every scenario in order, one request at a time, and reads back what the router knows of each."""
    client = ChatClient(graph.frontend_url, graph.settings.served_model)
    answers: list[tuple[str, Answer]] = []
    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    plain = not console.is_terminal
    with Progress(*columns, console=console, disable=plain) as progress:
        for scenario in scenarios:
            started = time.monotonic()
            task = progress.add_task(scenario.title, total=len(scenario.requests))
            for request in scenario.requests:
                answers.append((scenario.name, await client.send(request)))
                progress.advance(task)
            if plain:
                took = f"{len(scenario.requests)} requests, {time.monotonic() - started:.0f} s"
                console.print(f"{scenario.title}: {took}", markup=False, soft_wrap=True)
    facts, missing = await read_routes(graph.page_url(), answers)
    if missing:
        console.print(f"{missing} requests are unknown to the router", style="red")
    failed: dict[str, int] = {}
    for name, answer in answers:
        if not answer.ok:
            failed[name] = failed.get(name, 0) + 1
    return rows([scenario.name for scenario in scenarios], facts, failed), answers


async def read_routes(page_url: str, answers: Sequence[tuple[str, Answer]]) -> tuple[list[RouteFacts], int]:
    """(facts of every served request, how many requests the router does not know). Waits until the last route has
    closed, for REPORT_SECONDS at most."""
    facts: list[RouteFacts] = []
    missing = 0
    deadline = time.monotonic() + REPORT_SECONDS
    async with aiohttp.ClientSession() as session:
        for name, answer in answers:
            if not answer.ok:
                continue
            routes: list[dict[str, Any]] = []
            while not routes and time.monotonic() < deadline:
                async with session.get(f"{page_url}/api/requests/{answer.request_id}") as response:
                    routes = (await response.json())["routes"] if response.status == 200 else []
                if not routes:
                    await asyncio.sleep(0.1)
            missing += not routes
            facts += [RouteFacts.from_page(name, route) for route in routes]
    return facts, missing
