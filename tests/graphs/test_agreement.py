"""The funnel summed three ways under load and kills: from the metrics, from the history behind the page, and from what
is on the bus.

The sums over the bus are made here, from the raw route events and reports, by a join of their own: what they share with
the router is the wire format alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import nats
import pytest

from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import decode_report, decode_route_event
from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.bus.waiting import records
from tests.graphs.traffic import PATIENT, Traffic, get, read, snapshot, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]

REPORT_SECONDS = 15.0
"""Longer than a process stands still on a busy machine: a report that comes in time at one router only is a
difference."""
STEPS = ("input", "evidence", "placed", "hinted", "materialized", "beyond_dynamo")


class OnBus(NamedTuple):
    opened: dict[str, RouteOpened]
    observed: dict[str, RouteObserved]
    reports: list[tuple[float, MaterializationReport]]
    """(Unix seconds of the broker, report): of each engine request the one that confirmed most."""

    @property
    def ended(self) -> list[RouteOpened]:
        """Routes whose end somebody published; a router that is killed takes the ends of its running streams with
        it."""
        return [route for route_id, route in self.opened.items() if route_id in self.observed]


async def read_bus(url: str) -> OnBus:
    client = await nats.connect(url)
    try:
        js = client.jetstream()

        async def messages(stream: str) -> list[tuple[float, bytes]]:
            state = (await js.stream_info(stream)).state
            found = []
            for sequence in range(max(state.first_seq, 1), state.last_seq + 1):
                message = await js.get_msg(stream, sequence)
                assert message.time is not None
                found += [(message.time.timestamp(), record) for record in records(message)]
            return found

        opened: dict[str, RouteOpened] = {}
        observed: dict[str, RouteObserved] = {}
        for _, raw in await messages(subjects.ROUTE_STREAM):
            event = decode_route_event(raw)
            if isinstance(event, RouteOpened):
                opened[event.route_id] = event
            else:
                observed[event.route_id] = event
        best: dict[tuple[object, ...], tuple[float, MaterializationReport]] = {}
        for at, raw in await messages(subjects.REPORT_STREAM):
            report = decode_report(raw)
            request = (
                report.stable_routing_id,
                report.dp_rank,
                report.generation,
                report.prompt_key,
                report.request_id,
            )
            if request not in best or report.confirmed > best[request][1].confirmed:
                best[request] = (at, report)
        return OnBus(opened, observed, list(best.values()))
    finally:
        await client.close()


def joined(bus: OnBus) -> dict[str, int]:
    """Route id -> confirmed tokens, by prompt, replica and time alone: a client here asks for a prompt again only
    seconds after it had its answer, so a report belongs to the last route with its prompt that had begun on its
    replica. The ids in reports are not looked at."""
    found: dict[str, int] = {}
    for at, report in sorted(bus.reports, key=lambda item: item[0]):
        begun = [
            (bus.opened[route_id].opened_at, route_id)
            for route_id, end in bus.observed.items()
            if route_id in bus.opened
            and bus.opened[route_id].prompt_key == report.prompt_key
            and (end.served_stable_routing_id, end.served_dp_rank) == (report.stable_routing_id, report.dp_rank)
            and bus.opened[route_id].opened_at <= at
        ]
        if begun and max(begun)[1] not in found:
            found[max(begun)[1]] = report.confirmed
    return found


def summed(routes: Iterable[RouteOpened], confirmed: dict[str, int], ends: dict[str, RouteObserved]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for route in routes:
        got = confirmed.get(route.route_id, 0)
        totals["input"] += route.input_tokens
        totals["evidence"] += route.evidence_tokens
        totals["placed"] += route.placed_tokens
        totals["hinted"] += route.hinted_tokens
        totals["materialized"] += min(got, route.hinted_tokens)
        placed = f"{route.stable_routing_id}/{route.dp_rank}"
        end = ends.get(route.route_id)
        held = (
            end is None
            or end.served_stable_routing_id is None
            or placed == f"{end.served_stable_routing_id}/{end.served_dp_rank}"
        )
        if held and route.dynamo_choice not in (None, placed):
            totals["beyond_dynamo"] += min(got, route.hinted_tokens)
        totals["unhinted"] += max(0, got - route.hinted_tokens)
    return {step: totals[step] for step in (*STEPS, "unhinted")}


def of_history(said: dict[str, Any]) -> dict[str, int]:
    steps = {row["step"]: row["tokens"] for row in said["funnel"]}
    return {**steps, "unhinted": said["beside"]["unhinted_tokens"]}


def record(graph: LocalGraph, router: str, bus: OnBus) -> dict[str, int]:
    """Route id -> confirmed tokens, for every route that has ended, as this router keeps it."""
    kept = {}
    for route in bus.ended:
        url = f"{graph.page_url(router)}/api/routes/{route.route_id}"
        # On a busy machine a page may answer late, which reads as nothing.
        closed = wait_until(f"{router} shows route {route.route_id}", lambda url=url: get(url))  # type: ignore[misc]
        kept[route.route_id] = closed["report"]["confirmed"] if closed["report"] is not None else 0
    return kept


def told(route_ids: Iterable[str], bus: OnBus) -> Iterable[str]:
    """All that the bus has of their prompts, oldest first."""
    keys = {bus.opened[route_id].prompt_key for route_id in route_ids}
    lines = [(r.opened_at, f"route {r.route_id} of {r.router}") for r in bus.opened.values() if r.prompt_key in keys]
    for route_id, end in bus.observed.items():
        if route_id in bus.opened and bus.opened[route_id].prompt_key in keys:
            served = f"{end.served_stable_routing_id}/{end.served_dp_rank}"
            lines.append((end.observed_at, f"end {end.end} of {route_id} by {served}"))
    for at, report in bus.reports:
        if report.prompt_key in keys:
            place = f"{report.stable_routing_id}/{report.dp_rank}"
            lines.append((at, f"report of {report.route_id} by {place} {report.generation}: {report.confirmed}"))
    return [f"{at:.3f} {line}" for at, line in sorted(lines)]


def of_metrics(graph: LocalGraph, router: str) -> dict[str, int]:
    lines = read(f"{graph.page_url(router)}/metrics").decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("semkv_") and "{" not in line)
    return {step: int(float(values[f"semkv_{step}_tokens_total"])) for step in (*STEPS, "unhinted")}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Any:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        routers=2,
        data_parallel_size=1,
        blocks_per_rank=64,  # fewer than the prompts below take, so that host memory has what the device lost
        overrides={
            **LOW_GATE,
            **PATIENT,
            "outcome": {"report_ttl_seconds": REPORT_SECONDS},
            "connector": {"announce_interval_seconds": 1.0},
        },
    )
    with LocalGraph(settings, run_dir=tmp_path_factory.mktemp("agreement"), model_dir=model_dir) as started:
        yield started


def test_metrics_history_and_bus_agree_under_load_and_kills(graph: LocalGraph) -> None:
    names = {router: snapshot(graph, router)["router"] for router in graph.router_names}
    killed = names["router-0"]
    traffic = Traffic(graph, threads=3, max_tokens=8, prompts=40)  # a prompt comes again after seconds
    traffic.wait_for(150)
    graph.kill("worker-0")
    traffic.wait_for(10)
    graph.start("worker-0")
    graph.wait_ready()
    traffic.wait_for(20)
    before = of_metrics(graph, "router-0")
    graph.kill("router-0")
    traffic.wait_for(10)
    graph.start("router-0")
    graph.wait_ready()
    names["router-0"] = snapshot(graph, "router-0")["router"]
    wait_until("the new router has served", lambda: of_metrics(graph, "router-0")["input"], 60.0)
    traffic.wait_for(10)
    traffic.stop()  # whether each of them was served is the matter of test_kills

    def complete() -> OnBus | None:
        """What is on the bus, once every route that has ended is closed on both routers, with its report or when its
        time was over."""
        bus = asyncio.run(read_bus(graph.nats.url))
        said = [snapshot(graph, router) for router in graph.router_names]
        return (
            bus
            if all(s.get("requests") == len(bus.ended) and s["held_reports"] <= s["open_routes"] for s in said)
            else None
        )

    bus = wait_until("every route closed on both routers", complete, 12 * REPORT_SECONDS)
    reported = joined(bus)
    # A router that was killed left routes without an end. Whose report it is that such a prompt has, nobody can tell
    # for sure any more.
    unsure = {route.prompt_key for route_id, route in bus.opened.items() if route_id not in bus.observed}
    # Or it took the whole record of one with it, which was still gathered, and what is there of it is a report.
    ended = Counter(route.prompt_key for route in bus.ended)
    unsure |= {
        key for key, count in Counter(report.prompt_key for _, report in bus.reports).items() if count > ended[key]
    }
    assert len(unsure) <= 6, "more than three clients can have left, with one attempt more each"
    on_bus = sum(report.confirmed for _, report in bus.reports)
    its_own: dict[str, int] = {}

    for router in graph.router_names:
        said, kept = snapshot(graph, router), record(graph, router, bus)
        different = {
            route.route_id: (kept[route.route_id], reported.get(route.route_id, 0))
            for route in bus.ended
            if route.prompt_key not in unsure and kept[route.route_id] != reported.get(route.route_id, 0)
        }
        assert different == {}, "\n".join(
            [f"routes in the record of {router} against the reports on the bus", *told(different, bus)]
        )
        assert of_history(said) == summed(bus.ended, kept, bus.observed), f"totals of {router} against its record"
        beside = said["beside"]
        assert beside["confirmed_tokens"] == sum(kept.values())
        assert beside["confirmed_tokens"] <= on_bus
        own = summed([route for route in bus.ended if route.router == names[router]], kept, bus.observed)
        assert of_metrics(graph, router) == own, f"metrics of {router} against the routes that it opened"
        everything = of_history(said)
        its_own = summed([route for route in bus.ended if route.router == killed], kept, bus.observed)
        certain = [route for route in bus.ended if route.prompt_key not in unsure]
        assert summed(certain, kept, bus.observed) == summed(certain, reported, bus.observed)

    # What the killed router had counted when it was last read was right; what closed later is in the history, and in no
    # counter.
    assert all(0 <= before[step] <= its_own[step] for step in its_own), (before, its_own)

    steps = [everything[step] for step in STEPS]
    assert steps == sorted(steps, reverse=True)
    assert everything["materialized"] > 0, "nothing was materialized, so nothing was compared"
    assert before["input"] > 0
    assert {route.router for route in bus.ended} == {killed, *names.values()}
