"""Logs one line at DEBUG when a route opens and one when its stream ends: what `explain` shows, in the log. No text, no
tokens, no tenant."""

from __future__ import annotations

import logging

from dynamo_semkv.contracts.route_events import RouteObserved, RouteOpened
from dynamo_semkv.router.service import Journal

logger = logging.getLogger(__name__)


class LoggedJournal:
    """A Journal that logs each record after it was written."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def opened(self, event: RouteOpened) -> None:
        """Writes the record, then logs the decision and its token counts."""
        self._journal.opened(event)
        if not logger.isEnabledFor(logging.DEBUG):
            return
        logger.debug(
            "route opened: %s in mode %s, lookup %s, replica %s/%s; tokens: %d input, %d evidence, %d placed, %d "
            "hinted",
            event.decision_reason,
            event.mode,
            event.lookup,
            event.stable_routing_id,
            event.dp_rank,
            event.input_tokens,
            event.evidence_tokens,
            event.placed_tokens,
            event.hinted_tokens,
        )

    def observed(self, event: RouteObserved) -> None:
        """Writes the record, then logs how the stream ended and who served."""
        self._journal.observed(event)
        if not logger.isEnabledFor(logging.DEBUG):
            return
        logger.debug(
            "route ended: %s, served by %s/%s, first chunk after %s s, %d output tokens, %s of the engine's own cache",
            event.end,
            event.served_stable_routing_id,
            event.served_dp_rank,
            event.ttft_seconds,
            event.output_tokens,
            event.engine_cached_tokens,
        )
