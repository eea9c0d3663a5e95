"""What the edge to Dynamo is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EdgeSettings:
    """Where the workers are, what is offered to clients, and how Dynamo's router behaves.

    `model_name`, `model_path`, the parsers and the context length default to what the workers' card says, so that they
    are set in one place.
    """

    worker_endpoint: str = "dynamo.backend.generate"
    router_endpoint: str = "dynamo.semkv.generate"
    model_name: str | None = None
    model_path: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    kv_router: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of Dynamo's KvRouterConfig (router_temperature, overlap_score_credit, ...).
    `router_replica_sync` is on unless said otherwise: with several router processes behind one name, each would know
    only its own share of the load."""
    load_thresholds: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of Dynamo's LoadThresholdConfig; empty = no admission limit."""
    session_affinity_ttl_s: int | None = None
    wait_workers_s: float = 600.0
    offer_model: bool = True
    """Register the public model; without it only the other endpoints can be called."""
    cards_s: float = 0.2
    """How old the view of the workers' cards may be."""
    suspect_s: float = 5.0
    """How long a lost worker is not pinned to; Dynamo's own router leaves it out for as long."""

    def __post_init__(self) -> None:
        for name in ("worker_endpoint", "router_endpoint"):
            value: str = getattr(self, name)
            if len([part for part in value.split(".") if part]) != 3 or value.count(".") != 2:
                raise ValueError(f"{name}: {value!r}, expected namespace.component.endpoint")


class EdgeError(RuntimeError):
    """The edge cannot start: no worker in time, or workers that do not fit together."""
