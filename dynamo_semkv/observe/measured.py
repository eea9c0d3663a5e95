"""Counts what providers answer, around the lookup, so that the lookup holds no counter for others."""

from __future__ import annotations

import logging
from typing import Protocol

from dynamo_semkv.evidence.deadline import LookupResult
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.observe.metrics import Metrics
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class Lookup(Protocol):
    """The part of evidence.deadline.DeadlineRunner that is used here."""

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Asks all providers, under the runner's own deadline."""
        ...


class MeasuredLookup:
    """A Lookup that counts the answer and the time of each provider."""

    def __init__(self, runner: Lookup, metrics: Metrics) -> None:
        self._runner = runner
        self._metrics = metrics

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Asks the runner, then counts."""
        result = await self._runner.lookup(query)
        try:
            for provider, (status, seconds) in result.by_provider.items():
                self._metrics.provider_answered(provider, status, seconds)
        except Exception:  # noqa: BLE001 - a counter may not fail the request that it counts; logged
            _throttled.exception("a metric was not counted")
        return result
