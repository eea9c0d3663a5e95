"""What an event_publisher has told the world, in numbers: for the leader's snapshot, and so for metrics, logs and
tests."""

from __future__ import annotations

from typing import Any

from worker_connector.leader.event_publisher import EventPublisher


def numbers_of(event_publisher: EventPublisher) -> dict[str, Any]:
    """JSON-able; nothing of any prompt. `donors` counts donors, `tokens` are sums over the reports."""
    donors, device = event_publisher.donors, event_publisher.device
    return {
        "event_publisher": dict(event_publisher.counts),
        "outcomes": {f"{outcome.value}/{reason.value}": n for (outcome, reason), n in event_publisher.outcomes.items()},
        "tokens": dict(event_publisher.tokens),
        "donors": len(donors) if donors is not None else 0,
        "kv_events": device.snapshot() if device is not None else None,
        "donor_counts": dict(donors.counts) if donors is not None else {},
        "hints": {**event_publisher.table.counts, **event_publisher.hints.counts},
    }
