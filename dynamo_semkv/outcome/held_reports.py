"""HeldReports: reports whose route is not known yet, by prompt, by the route they name and by worker. Bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dynamo_semkv.contracts.report import MaterializationReport
from dynamo_semkv.evidence.shares import Shares
from dynamo_semkv.outcome.join import HeldReport
from dynamo_semkv.outcome.queues import DueQueue, Groups


class HeldReports:
    """Reports by id. One is due `ttl_seconds` after it came; beyond `limit` the worker with most loses its oldest."""

    def __init__(self, ttl_seconds: float, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, HeldReport] = {}
        self._due = DueQueue[str](ttl_seconds)
        self._by_prompt = Groups[bytes]()
        self._by_route = Groups[str]()
        self._by_worker = Shares[str, str]()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, report_id: str) -> bool:
        return report_id in self._held

    def __getitem__(self, report_id: str) -> HeldReport:
        return self._held[report_id]

    def add(self, held: HeldReport) -> list[MaterializationReport]:
        """Keeps a report. Returns those that had to go for it."""
        report = held.report
        self._held[report.report_id] = held
        self._by_prompt.add(report.prompt_key, report.report_id)
        if report.route_id is not None:
            self._by_route.add(report.route_id, report.report_id)
        self._due.add(report.report_id, held.at)
        self._by_worker.use(report.stable_routing_id, report.report_id)
        gone = []
        while len(self._held) > self._limit and (victim := self._by_worker.victim()) is not None:
            gone.append(self.drop(victim[1]).report)
        return gone

    def drop(self, report_id: str) -> HeldReport:
        """Removes and returns the report. Raises KeyError for an unknown id."""
        held = self._held.pop(report_id)
        report = held.report
        self._by_prompt.discard(report.prompt_key, report_id)
        if report.route_id is not None:
            self._by_route.discard(report.route_id, report_id)
        self._due.discard(report_id)
        self._by_worker.drop(report.stable_routing_id, report_id)
        return held

    def of(self, prompt_key: bytes, route_ids: Iterable[str]) -> list[HeldReport]:
        """The reports with that prompt or that name one of those routes, each once."""
        ids = dict.fromkeys(self._by_prompt.of(prompt_key))
        for route_id in route_ids:
            ids.update(dict.fromkeys(self._by_route.of(route_id)))
        return [self._held[report_id] for report_id in ids]

    def naming(self, route_id: str) -> Iterator[str]:
        """Ids of the reports that name the route, over a copy."""
        return self._by_route.of(route_id)

    def pop_due(self, now: float) -> list[str]:
        """Ids of the reports that have waited long enough; each is kept until `drop` or `wait_again`."""
        return self._due.pop_due(now)

    def wait_again(self, report_id: str, now: float) -> None:
        """Starts the report's time again."""
        self._due.add(report_id, now)

    def shift(self, seconds: float) -> None:
        """Moves all times by `seconds`; see RouteTracker.rebase."""
        self._due.shift(seconds)
        for report_id, held in self._held.items():
            self._held[report_id] = held._replace(at=held.at + seconds)
