"""A small run as `graphs.bench` writes it, with made-up times."""

from __future__ import annotations

from typing import Any


def record(scenario: str, contender: str, repeat: int, number: int, ttft: float, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "scenario": scenario,
        "contender": contender,
        "repeat": repeat,
        "turn": 0,
        "phase": "first" if number == 0 else "again",
        "number": number,
        "ok": True,
        "ttft": ttft,
        "seconds": ttft + 0.1,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "pass_seconds": 2.0,
        "likeness": {"token_match": 1.0, "rouge_l": 1.0, "f1": 1.0},
        "route": None,
        "error": None,
    }
    return base | changes


def route(outcome: str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "decision": "placed",
        "outcome": outcome,
        "reason": "ok",
        "ttft_class": "loaded" if outcome == "materialized_exact" else "cold",
        "router_ttft": 0.1,
        "lookup": "hit",
        "lookup_seconds": 0.001,
        "evidence": 96,
        "placed": 96,
        "hinted": 96,
        "confirmed": 96 if outcome == "materialized_exact" else 0,
        "local": 0,
        "tier": "host_pinned" if outcome == "materialized_exact" else None,
        "load_seconds": 0.002 if outcome == "materialized_exact" else None,
        "cross_check": "equal",
    }
    return base | changes


def group() -> dict[str, Any]:
    """Two repeats; in the second one everything takes twice as long."""
    records = []
    for repeat, slow in enumerate((1.0, 2.0)):
        missed = route("no_donor", lookup="miss", placed=0, hinted=0, evidence=0)
        records += [
            record("set", "semkv", repeat, 0, 0.4 * slow, route=missed),
            record("set", "semkv", repeat, 1, 0.1 * slow, cached_tokens=96, route=route("materialized_exact")),
            record("set", "kv", repeat, 0, 0.4 * slow),
            record("set", "kv", repeat, 1, 0.4 * slow),
            record("set", "cold", repeat, 0, 0.4 * slow, likeness=None),
            record("none", "semkv", repeat, 0, 0.42 * slow, route=route("declined", reason="not_identical")),
            record("none", "kv", repeat, 0, 0.40 * slow),
        ]
    return {
        "title": "made up",
        "model": "tiny",
        "workers": 2,
        "device_tokens": 64,
        "gap": 0.5,
        "engine": {"flops_per_token": 1e6, "attention_flops_per_square_token": 1e3, "kv_bytes_per_token": 3072.0},
        "scenarios": {
            "set": {"title": "a set", "kind": "reuse", "requests": 2, "paced": True},
            "none": {"title": "nothing", "kind": "negative", "requests": 1, "paced": True},
        },
        "records": records,
        "trouble": [],
    }


def run(**sections: Any) -> dict[str, Any]:
    """A raw run of the sections given, each as `found`."""
    return {
        "schema": 1,
        "command": "dynamo_semkv bench report",
        "at": "2026-01-01 00:00 UTC",
        "quick": False,
        "repeats": 2,
        "seed": 7,
        "machine": {
            "cpu": "made up",
            "cores": 2,
            "memory_gib": 4.0,
            "system": "Linux",
            "python": "3.11",
            "dynamo_semkv": "0",
            "commit": None,
            "packages": {},
        },
        "sections": {
            name: {"at": "2026-01-01 00:00 UTC", "load_before": 0.0, "found": found, "seconds": 60.0}
            for name, found in sections.items()
        },
    }


def scenarios() -> dict[str, Any]:
    return {"groups": {"rfc": group()}, "left_out": {"semblend": "not installed: torch"}, "exactness": [exactness()]}


def exactness(difference: float = 0.0) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "aligned",
        "tokens": 532,
        "loaded_tokens": 512,
        "warm_tokens": 512,
        "same_tokens": True,
        "max_difference_warm_cold": 0.0,
        "max_difference_loaded_cold": 0.0,
        "max_difference_loaded_warm": difference,
        "perplexity_cold": 31.0,
        "perplexity_warm": 31.0,
        "perplexity_loaded": 31.0,
    }


def scaling(at_100k: float = 500.0) -> dict[str, Any]:
    donors = [
        {
            "donors": n,
            "tokens": 8192,
            "hit_p50": lookup,
            "hit_p99": 900.0,
            "miss_p99": 400.0,
            "beside_p99": 4_000.0,
            "bytes_per_donor": 3_600.0,
            "registers_per_second": 6_000.0,
            "at_capacity_per_second": 5_500.0,
            "moves_per_second": 80_000.0,
            "evictions_per_second": 90_000.0,
            "longest_own": 4_000.0,
            "stall_max": 4_500.0,
        }
        for n, lookup in ((1_000, 480.0), (10_000, 490.0), (100_000, at_100k))
    ]
    return {
        "limits": {
            "copy_bytes_per_second": 1e10,
            "read_bytes_per_second": 2e10,
            "miss_seconds": 5e-9,
            "flops_per_second": 1e11,
        },
        "prompt_tokens": 8_192,
        "donors": donors,
        "replicas": [{"replicas": n, "own_p50": 1e-5 * n, "p50": 1e-5 * n, "p99": 2e-5 * n} for n in (1, 8, 64)],
    }


def router(p50: float = 0.8) -> dict[str, Any]:
    """Milliseconds, as `bench router --json` gives them."""

    def cost(stage: str, scale: float = 1.0) -> dict[str, Any]:
        times = {"wall_p50": p50, "wall_p99": 2 * p50, "own_p50": p50, "own_p99": 2 * p50}
        return {"stage": stage, **{name: scale * value for name, value in times.items()}}

    rows = [{"replicas": n, "weigh": cost("weigh", n / 8), "whole": cost("whole", n / 8)} for n in (1, 8, 64)]
    return {
        "donors": 10_000,
        "tokens": 8_192,
        "requests": 400,
        "stages": [cost("weigh", 0.5), cost("whole")],
        "scales": {
            str(donors): {"wall_p50": [p50, p50], "wall_p99": [2 * p50, 2.1 * p50], "own_p50": [p50], "own_p99": [p50]}
            for donors in (10_000, 100_000)
        },
        "decisions": rows,
        "throughput": [throughput()],
    }


def throughput() -> dict[str, Any]:
    def one(rate: float) -> dict[str, Any]:
        return {"per_second": [rate, 2 * rate], "ttft_p50_ms": [10.0, 5.0], "processor_ms": [4.0, 4.0], "failed": 0}

    return {
        "ranks": 8,
        "tokens": 8_192,
        "max_tokens": 16,
        "concurrency": 16,
        "rounds": 2,
        "contenders": {"mock": one(40.0), "bare": one(30.0), "ours": one(28.0)},
        "log_errors": 0,
        "ours_over_bare": 28 / 30,
        "ours_over_rust": 0.7,
        "bare_over_rust": 0.75,
    }
