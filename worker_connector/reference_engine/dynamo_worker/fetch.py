"""Handles `kv.fetch@1.0` in the reference engine's Dynamo worker: the hint's blocks are pulled before the engine sees
the request.

The request waits for them in the event loop, for `connector.fetch.wait_ms` at most, while others go by; the engine's
threads are not involved. What has not come by then serves the next request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from dynamo_semkv.contracts.hints import DONOR_ACTION, KvHintsEnvelope
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.fetch.peer_fetch import PeerFetch
from worker_connector.reference_engine.dynamo_worker.request import Submission
from worker_connector.requests.hints import HintReader

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

OPEN_SECONDS = 20.0
"""How long a rank may take until it listens."""


def peer_fetches(schedulers: Sequence[Any]) -> list[PeerFetch]:
    """The `PeerFetch` of every rank; empty unless every rank has one."""
    found = [getattr(scheduler, "peer_fetch", None) for scheduler in schedulers]
    return [fetch for fetch in found if fetch is not None] if all(found) else []


async def endpoints_of(fetches: Sequence[PeerFetch]) -> dict[int, str]:
    """The endpoint of each rank. Empty unless every rank listens: a worker pulls and serves, or does neither."""
    waits = [asyncio.to_thread(fetch.wait_open, OPEN_SECONDS) for fetch in fetches]
    endpoints = dict(enumerate(await asyncio.gather(*waits)))
    if not all(endpoints.values()):
        logger.error(
            "no blocks are pulled or served: ranks %s do not listen", [r for r, e in endpoints.items() if not e]
        )
        return {}
    return {rank: endpoint for rank, endpoint in endpoints.items() if endpoint is not None}


class FetchAhead:
    """Lets requests wait for the blocks that their hints name, each for `wait_seconds` at most. `counted`: the engine
    gets the hints on the request too and counts what is in them, so they are not counted here."""

    def __init__(self, fetches: Sequence[PeerFetch], wait_seconds: float, *, counted: bool = False) -> None:
        self._fetches = fetches
        self._wait = wait_seconds
        self._uncounted = HintReader(fetches=True) if counted else None
        self.waited: dict[str, int] = {"arrived": 0, "late": 0, "failed": 0}

    async def before(self, asked: Submission, hints: KvHintsEnvelope | None) -> None:
        """Returns when the blocks that can come in time have come. Raises nothing but cancellation."""
        rank = asked.rank_of(len(self._fetches))
        if hints is None or rank is None:
            return
        # Donor hints are not for this place: they reach the connector by the hint table, or on the request.
        others = [action for action in hints.actions if action.action_type != DONOR_ACTION]
        reader = self._uncounted or self._fetches[rank].reader
        fetch = reader.parse(replace(hints, actions=others), by_dynamo=True).fetch
        if fetch is None:
            return
        try:
            pull = self._fetches[rank].fetch(asked.token_ids, fetch, salt=asked.cache_salt)
        except Exception:  # noqa: BLE001 - a fault of the pull may not fail the request: it is computed
            self.waited["failed"] += 1
            _throttled.exception("a pull could not be begun")
            return
        if pull is None or self._wait <= 0:
            return
        done, _ = await asyncio.wait({asyncio.wrap_future(pull)}, timeout=self._wait)
        self.waited["arrived" if done else "late"] += 1
