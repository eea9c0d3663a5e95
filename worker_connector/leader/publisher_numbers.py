"""What an outlet has told the world, in numbers: for the leader's snapshot, and so for metrics, logs and tests."""

from __future__ import annotations

from typing import Any

from worker_connector.leader.event_publisher import Outlet


def numbers_of(outlet: Outlet) -> dict[str, Any]:
    """JSON-able; nothing of any prompt. `donors` counts donors, `tokens` are sums over the reports."""
    donors, device = outlet.donors, outlet.device
    return {
        "outlet": dict(outlet.counts),
        "outcomes": {f"{outcome.value}/{reason.value}": n for (outcome, reason), n in outlet.outcomes.items()},
        "tokens": dict(outlet.tokens),
        "donors": len(donors) if donors is not None else 0,
        "kv_events": device.snapshot() if device is not None else None,
        "donor_counts": dict(donors.counts) if donors is not None else {},
        "hints": {**outlet.table.counts, **outlet.hints.counts},
    }
