"""A router's state as an operator would find it: made of real routes in a real history, seeded."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

from dynamo_semkv.bus.outbox import PublisherStats
from dynamo_semkv.bus.subscriber import SubscriberStats
from dynamo_semkv.contracts.evidence import Bucket, MatchType
from dynamo_semkv.contracts.identity import stable_worker_id
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.observe.dynamo_counters import DynamoTokens
from dynamo_semkv.observe.state import ReplicaStatus, RouterState, StreamStatus
from dynamo_semkv.outcome.closed import ClosedRoute, JoinedBy, OrphanReason, OrphanReport, close_route
from dynamo_semkv.outcome.history import History
from dynamo_semkv.outcome.route_tracker import TrackerStats
from dynamo_semkv.outcome.saving import Saving
from tests.outcome.build import observed, opened, report

NOW = 1_790_000_000.0
WORKERS = ("worker-a", "worker-b")
INSTANCES = {"worker-a": 7_587_890_123_456_789_001, "worker-b": 7_587_890_123_456_789_002}

_ENDINGS: list[tuple[float, Outcome, Reason]] = [
    (0.42, Outcome.MATERIALIZED_EXACT, Reason.OK),
    (0.14, Outcome.LOCAL_EXACT, Reason.LOCAL_COVERS),
    (0.16, Outcome.NO_DONOR, Reason.NONE),
    (0.10, Outcome.DECLINED, Reason.NOT_IDENTICAL),
    (0.06, Outcome.DECLINED, Reason.NOT_RESIDENT),
    (0.04, Outcome.STALE_DONOR, Reason.DONOR_EVICTED),
    (0.02, Outcome.LOAD_FAILED, Reason.CHECKSUM_MISMATCH),
]


def fake_route(number: int, at: float, rng: random.Random, *, mode: str = "enforce", **fields: Any) -> ClosedRoute:
    """One closed route of a workload in which about half of the placed tokens are confirmed."""
    outcome, reason = _ending(rng)
    tokens = rng.choice([640, 1_280, 2_560, 4_096])
    donor = outcome not in (Outcome.NO_DONOR, Outcome.LOCAL_EXACT)
    evidence = int(tokens * rng.uniform(0.7, 0.95)) // 32 * 32 if donor else 0
    chosen = donor and rng.random() < 0.86
    acts = mode == "enforce" and chosen
    placed = evidence if acts else 0
    hinted = placed if rng.random() < 0.95 else 0
    loaded = evidence if outcome is Outcome.MATERIALIZED_EXACT and (acts or rng.random() < 0.3) else 0
    device = rng.choice([0, 0, 64, 128])
    local = int(tokens * 0.9) // 32 * 32 if outcome is Outcome.LOCAL_EXACT else 32
    worker, rank = rng.choice(WORKERS), rng.randrange(2)
    ttft = rng.gauss(1.0, 0.05) * {True: 0.06}.get(bool(loaded), 0.045 if local > tokens / 2 else 0.6)
    values: dict[str, Any] = {
        "request_id": f"request-{number:08x}",
        "model": "SmolLM2-135M-Instruct",
        "mode": mode,
        "opened_at": at - ttft - 2.0,
        "input_tokens": tokens,
        "evidence_tokens": evidence,
        "placed_tokens": placed,
        "hinted_tokens": hinted,
        "exact_device_tokens": device,
        "exact_host_tokens": loaded // 2 // 32 * 32,
        "lookup": "hit" if donor else rng.choice(["miss", "miss", "skipped", "timeout"]),
        "lookup_seconds": 0.0011,
        "decision_reason": ("placed" if acts else "shadow" if chosen else rng.choice(["below_margin", "dynamo_exact"]))
        if donor
        else rng.choice(["no_evidence", "exact_covers"]),
        "donor_id": f"{number * 7_919:032x}" if donor else None,
        "match_type": MatchType.EXACT_EQUIVALENT if donor else None,
        "overlap": Bucket.HIGH if donor else Bucket.NONE,
        "provider": "fingerprint" if donor else None,
        "tier": Tier.HOST_PINNED if donor else None,
        "stable_routing_id": worker if acts else None,
        "dp_rank": rank if acts else None,
        "shadow_choice": f"{rng.choice(WORKERS)}/{rank}" if chosen and not acts else None,
        "route_id": hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest(),
        "prompt_key": number.to_bytes(16, "big"),
        **fields,
    }
    start = opened(number, **values)
    silent = rng.random() < 0.03
    end = observed(
        number,
        route_id=values["route_id"],
        observed_at=at - 1.0,
        end="cancelled" if silent and rng.random() < 0.4 else "complete",
        served_stable_routing_id=fields.get("stable_routing_id", worker),
        served_dp_rank=rank,
        served_worker_id=str(INSTANCES[worker]),
        ttft_seconds=ttft,
        engine_cached_tokens=local + loaded,
    )
    what = report(
        number,
        route_id=values["route_id"],
        prompt_key=values["prompt_key"],
        stable_routing_id=worker,
        dp_rank=rank,
        prompt_tokens=tokens,
        local_tokens=local if local + loaded <= tokens else 0,
        confirmed=loaded,
        outcome=outcome if loaded or outcome is not Outcome.MATERIALIZED_EXACT else Outcome.NO_DONOR,
        reason=reason if loaded or outcome is not Outcome.MATERIALIZED_EXACT else Reason.NONE,
        tier=Tier.HOST_PINNED if loaded else None,
        load_seconds=0.004 if loaded else None,
    )
    if silent:
        return close_route(start, end, None, JoinedBy.NONE, at)
    cold = tokens / 2_000
    saving = Saving(1 / 2_000, cold, cold - ttft, 0.8) if loaded else None
    return replace(close_route(start, end, what, JoinedBy.ROUTE_ID, at), saving=saving)


def fake_history(routes: int = 600, *, mode: str = "enforce", seed: int = 7, size: int = 10_000) -> History:
    """`routes` over the last half hour, more of them later on."""
    rng = random.Random(seed)
    history = History(size)
    times = sorted(NOW - 1_800.0 * rng.random() ** 1.5 for _ in range(routes))
    for number, at in enumerate(times, start=1):
        history.add(fake_route(number, at, rng, mode=mode))
    for number, reason in enumerate((OrphanReason.LATE, OrphanReason.WRONG_REPLICA), start=1) if routes else ():
        history.add_orphan(OrphanReport(report(10**6 + number), reason, NOW))
    return history


def fake_replicas() -> list[ReplicaStatus]:
    return [
        ReplicaStatus(
            worker_id=INSTANCES[worker],
            dp_rank=rank,
            stable_routing_id=worker,
            model="SmolLM2-135M-Instruct",
            generation="5f2a9c0d1e7b4a36",
            materialization="exact",
            slab_blocks=4_096,
            resident_blocks=900 + 700 * number,
            total_blocks=1_024,
            queued_prefill_tokens=[0, 2_560, 640, 5_120][number],
            active_decode_blocks=[120, 610, 300, 890][number],
            active_requests=[1, 4, 2, 6][number],
        )
        for number, (worker, rank) in enumerate((w, r) for w in WORKERS for r in range(2))
    ]


def fake_catalog(donors: int = 412) -> dict[str, Any]:
    return {
        "donors": donors,
        "sketch_bytes": donors * 1_400,
        "namespaces": 3,
        "held_events": 0,
        "counts": {"applied": donors + 220, "duplicate": 3},
        "streams": [
            {
                "worker_id": str(stable_worker_id(worker)),
                "dp_rank": rank,
                "generation": "5f2a9c0d1e7b4a36",
                "next_event_id": 158,
                "donors": donors // 4,
                "quarantined": False,
                "absent": False,
            }
            for worker in WORKERS
            for rank in range(2)
        ],
    }


def fake_calibration() -> dict[str, Any]:
    cells = [
        {
            "replica": f"{worker}/{rank}",
            "match_type": match_type,
            "overlap": overlap,
            "tier": "host_pinned",
            "share": share - 0.07 * rank,
            "prior": prior,
            "trials": trials,
            "mode": "exact",
            "saving": 0.75 - 0.11 * rank,
            "saving_prior": 0.75,
            "loads": trials / 2,
            "routes": int(trials * 2),
        }
        for worker in WORKERS
        for rank in range(2)
        for match_type, overlap, share, prior, trials in (
            ("exact_equivalent", "high", 0.97, 0.9, 61.5),
            ("exact_equivalent", "medium", 0.71, 0.9, 12.25),
            ("semantic_candidate", "medium", 0.08, 0.1, 4.0),
        )
    ]
    return {
        "enabled": True,
        "half_life_routes": 200.0,
        "strength": 4.0,
        "routes": 260,
        "replicas": 4,
        "forgotten": 0,
        "match_types": {
            "exact_equivalent": {"share": 0.82, "trials": 211.5},
            "semantic_candidate": {"share": 0.03, "trials": 9.25},
        },
        "tiers": {"host_pinned": {"saving": 0.69, "loads": 77.75}, "disk": {"saving": 0.5, "loads": 0.0}},
        "prefill": [
            {"replica": f"{worker}/{rank}", "tokens_per_second": 2_000.4 + 500.0 * rank, "routes": 9}
            for worker in WORKERS
            for rank in range(2)
        ],
        "cells": cells,
    }


def fake_state(history: History | None = None, **changes: Any) -> RouterState:
    """Everything is well, unless `changes` says otherwise."""
    history = history if history is not None else fake_history()
    state = RouterState(
        now=NOW,
        uptime_seconds=1_860.0,
        router="router-1",
        mode="enforce",
        canary_percent=5.0,
        config_hash="9d1f27c4",
        history_size=10_000,
        totals=history.totals(),
        since=history.since,
        recent=history.recent(50),
        course=history.course(),
        open_routes=3,
        held_reports=0,
        book=TrackerStats(opened=600, observed=598, reports=580, closed=597, orphans=2, duplicates=1_790),
        replicas=fake_replicas(),
        publisher=PublisherStats(True, 0, 0, 1_812, 0, 0, 0, 0, None),
        subscriber=SubscriberStats(True, 4_211, 0, 0, 0, 0, 0, None),
        streams=[
            StreamStatus(name, True, messages)
            for name, messages in (("donors", 632), ("announcements", 188), ("routes", 1_195), ("reports", 580))
        ],
        catalog=fake_catalog(),
        calibration=fake_calibration(),
        providers={
            "fingerprint": {"lookups": {"hit": 430, "miss": 150, "timeout": 4}, "stuck": False, "breaker": "closed"}
        },
        fallbacks={"lookup_timeout": 4},
        dynamo=DynamoTokens(1_284_000, 402_500, 371_200, 655_360),
    )
    return replace(state, **changes)


def empty_state(**changes: Any) -> RouterState:
    """A router that has just come up, before any worker."""
    return fake_state(
        History(10),
        **{
            "uptime_seconds": 2.0,
            "mode": "shadow",
            "open_routes": 0,
            "book": TrackerStats(),
            "replicas": [],
            "streams": [StreamStatus(name, True) for name in ("donors", "announcements", "routes", "reports")],
            "catalog": {"donors": 0, "streams": [], "counts": {}},
            "providers": {"fingerprint": {"lookups": {}, "stuck": False, "breaker": "closed"}},
            "fallbacks": {},
            "dynamo": None,
            "calibration": {**fake_calibration(), "match_types": {}, "cells": []},
            **changes,
        },
    )


def _ending(rng: random.Random) -> tuple[Outcome, Reason]:
    weights = [weight for weight, _, _ in _ENDINGS]
    _, outcome, reason = rng.choices(_ENDINGS, weights)[0]
    return outcome, reason


__all__ = ["NOW", "empty_state", "fake_history", "fake_route", "fake_state"]
