"""How costs grow: lookups, memory and events with donors; a decision with replicas.

    python -m dynamo_semkv.bench.report.scaling --json FILE

Each number of donors is a process of its own, since memory is measured. What an offer costs by the length of the prompt
is measured on the engine side (`bench connector lookup`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.report import limits
from dynamo_semkv.bench.report.statistics import quantile
from dynamo_semkv.config.schema import ScoringConfig
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.scoring.choose import choose
from dynamo_semkv.scoring.replica_view import ReplicaView

DONORS = (1_000, 10_000, 100_000)
REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPT_TOKENS = 8_192
LOOKUPS = 1_000
"""Enough that ten of them are beyond a p99."""
MATCHES = 8
"""How many donors a lookup names, `evidence.max_matches`."""


def decision_seconds(replicas: int, rounds: int) -> dict[str, float]:
    """p50 and p99 of a score sheet over `replicas` replicas with MATCHES donors, by the thread's processor time and by
    the clock, in seconds."""
    keys = [ReplicaKey(n + 1, 0) for n in range(replicas)]
    views = [
        ReplicaView(key, queued_prefill_tokens=37 * n % 4_096, device_tokens=32 * (n % 7)) for n, key in enumerate(keys)
    ]
    matches = [(_match(n, keys[n % replicas]), keys[n % replicas]) for n in range(MATCHES)]
    config = ScoringConfig()
    own, wall = [], []
    for n in range(rounds + 1):
        began, own_began = time.perf_counter(), time.thread_time()
        sheet = choose(views, matches, PROMPT_TOKENS, config, n.to_bytes(8, "little"))
        if n:  # the first one warms up
            own.append(time.thread_time() - own_began)
            wall.append(time.perf_counter() - began)
        assert sheet.best is not None
    return {
        "replicas": replicas,
        "own_p50": quantile(own, 0.5),
        "p50": quantile(wall, 0.5),
        "p99": quantile(wall, 0.99),
    }


def _match(number: int, replica: ReplicaKey) -> SemanticTrtMatch:
    return SemanticTrtMatch(
        donor_id=f"donor-{number}",
        reusable_token_count=4_096 + number,
        exact_prefix_tokens=2_048,
        match_type=MatchType.EXACT_EQUIVALENT,
        location=WorkerLocation(replica.worker_id, replica.dp_rank, Tier.HOST_PINNED),
        provider="fingerprint",
        provider_generation="g",
        confidence=0.9,
    )


def donor_cost(donors: int, tokens: int, lookups: int = LOOKUPS) -> dict[str, Any]:
    """`evidence_cost.measure` in a process of its own. Raises RuntimeError with the end of its error output."""
    program = (
        "import json, sys; from dataclasses import asdict; from dynamo_semkv.bench.evidence_cost import measure; "
        "print(json.dumps(asdict(measure(*map(int, sys.argv[1:])))))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(donors), str(tokens), str(lookups)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{donors} donors: {ran.stderr[-500:]}")
    parsed: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, measures and writes the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_semkv.bench.report.scaling", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--donors", type=int, nargs="*", default=list(DONORS))
    parser.add_argument("--repeats", type=int, default=3, help="a million donors are measured once")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(argv)
    tokens, rounds = (1_024, 5) if arguments.quick else (PROMPT_TOKENS, 200)
    donors = [200, 400] if arguments.quick else arguments.donors
    replicas = (1, 8) if arguments.quick else REPLICAS
    small = {"mib": 4, "rounds": 2, "order": 64} if arguments.quick else {}
    found: dict[str, Any] = {
        "limits": asdict(limits.measure(**small)),
        "prompt_tokens": tokens,
        "donors": [],
        "replicas": [],
    }
    for _ in range(arguments.repeats):
        found["replicas"] += [decision_seconds(n, rounds) for n in replicas]
    for n in donors:
        for repeat in range(1 if n > max(DONORS) else arguments.repeats):
            print(f"scaling: {n} donors, {repeat + 1}", file=sys.stderr, flush=True)
            found["donors"].append(donor_cost(n, tokens, 20 if arguments.quick else LOOKUPS))
    arguments.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
