"""Which contenders are measured: one graph each, with the same engines, the same Dynamo and the same requests.

semkv          our router in front (enforce), our connector in the engines
no_lookup      semkv without evidence: no provider is asked; shows what the lookup costs
kv             Dynamo's frontend with `--router-mode kv`, engines without a connector: a graph without us
kv_connector   Dynamo's frontend with `--router-mode kv`, engines with our connector: shows what of a gain does not
               come from placement
passing        our router with `placement.mode: off`, engines without a connector: shows what a router of its own in
               front of the workers costs
round_robin    as kv, with `--router-mode round-robin`
semblend       our router with SemBlend's provider instead of the fingerprints, and a deadline that lets it answer
cold           as round_robin, and every request under a salt of its own: nothing can be reused
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo_semkv.bench.encoder_onnx import MODEL_PACKAGE, model_directory
from graphs.bench.groups import Group
from graphs.local.settings import GIVES_WAY, GraphSettings

SEMKV, NO_LOOKUP, KV, KV_CONNECTOR, PASSING = "semkv", "no_lookup", "kv", "kv_connector", "passing"
ROUND_ROBIN, SEMBLEND, COLD = "round_robin", "semblend", "cold"
OURS = (SEMKV, SEMBLEND)
"""Contenders with a router of ours whose record of every request is read."""
SEMBLEND_NEEDS = ("semblend_core", "rapidfuzz", "sentence_transformers", "torch")
SEMBLEND_DEADLINE_MS = 1_000.0
"""The most that the configuration allows. On a CPU a lookup takes hundreds of milliseconds; at the default of 5 it
would always be late."""
PLACEMENT = {"min_tokens": 64, "margin_tokens": 32}
"""Thresholds below the defaults, since prompts are short here."""


def missing(name: str) -> list[str]:
    """Packages that a contender needs and that are not installed."""
    if name != SEMBLEND:
        return []
    found = [package for package in SEMBLEND_NEEDS if find_spec(package) is None]
    return found if model_directory() is not None else [*found, MODEL_PACKAGE]


def niceness(group: Group) -> int:
    """How far the engines of a group give way to the other processes; those that take a GPU's time need not."""
    return GIVES_WAY if group.gives_way and group.profile is None else 0


def settings(name: str, group: Group, model_dir: Path, disk: Path) -> GraphSettings:
    """The graph of one contender. `model_dir` has the served model's tokenizer; `disk` is an empty directory for the
    disk tier, if the group has one."""
    ours = name in (*OURS, NO_LOOKUP)
    connector = ours or name == KV_CONNECTOR
    return GraphSettings(
        model=group.model,
        profile=group.profile,
        workers=group.workers,
        data_parallel_size=1,
        connector=connector,
        blocks_per_rank=group.blocks_per_rank,
        max_num_tokens=group.max_num_tokens,
        threads=group.threads,
        engine_niceness=niceness(group),
        mode="off" if name == PASSING else "enforce",
        router_mode=None if ours or name == PASSING else "kv" if name in (KV, KV_CONNECTOR) else "round-robin",
        overrides=_overrides(name, group, model_dir, disk) if connector else {},
    )


def _overrides(name: str, group: Group, model_dir: Path, disk: Path) -> dict[str, Any]:
    connector: dict[str, Any] = {"slab_bytes": group.slab_bytes}
    if group.disk_bytes:
        connector |= {"disk_path": str(disk), "disk_bytes": group.disk_bytes}
    found: dict[str, Any] = {"placement": PLACEMENT, "connector": connector}
    if name == NO_LOOKUP:
        found["evidence"] = {"fingerprint": {"enabled": False}}
    if name == SEMBLEND:
        found["evidence"] = {
            "deadline_ms": SEMBLEND_DEADLINE_MS,
            "fingerprint": {"enabled": False},
            "semblend": {"enabled": True, "model_path": str(model_directory()), "tokenizer_path": str(model_dir)},
        }
    return found
