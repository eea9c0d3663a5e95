"""MissingRanks: logs every so often which ranks a leader still waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.rank_aggregator import RankAggregator

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

MISSING_SECONDS = 60.0
"""Between two warnings."""


class MissingRanks:
    """Not thread-safe: the leader's lock covers it, but for `warn`."""

    def __init__(self, board: RankAggregator, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self._since: float | None = clock() if board.world > 1 else None

    def note(self) -> None:
        """To be called when the aggregator has changed."""
        if self._board.all_here:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    def overdue(self) -> list[int]:
        """Ranks that have been missing for `MISSING_SECONDS`; each time they are returned, that time begins anew."""
        if self._since is None or self._clock() - self._since < MISSING_SECONDS:
            return []
        self._since = self._clock()
        return self._board.missing

    def warn(self, missing: list[int]) -> None:
        """Logs these ranks with the remedy. Without the lock."""
        _throttled.warning(
            "semkv connector: ranks %s of %d have not reported; nothing is loaded or saved, requests are served as "
            "without the connector. A rank connects with the first batch, to a socket of this machine: ranks on other "
            "machines cannot. Remedy: keep tensor_parallel_size within one machine, or set connector.materialization: "
            "off",
            missing,
            self._board.world,
        )
