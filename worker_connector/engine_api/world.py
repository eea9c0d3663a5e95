"""How many ranks share one leader, and which of them this process is.

Under tensor parallelism the leader of rank 0 controls all ranks, which are processes of their own (KV Cache Connector
doc: the scheduler runs on rank 0 only). Under attention data parallelism every rank has its own leader, and so is
alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker_connector.engine_api.engine import engine_rank
from worker_connector.errors import Refused

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")
"""What launchers of MPI processes and torch set, the first one that is set counts."""


def world_of(llm_args: Any) -> int:
    """Number of ranks under one leader."""
    if getattr(llm_args, "enable_attention_dp", False):
        return 1
    return int(getattr(llm_args, "tensor_parallel_size", None) or 1)


def rank_of(llm_args: Any, env: Mapping[str, str]) -> int:
    """This process's rank. Under attention data parallelism the owner rank, where the engine's arguments say it.
    Refused when one of several ranks cannot tell which it is: two that call themselves the same would confirm each
    other's loads."""
    owner = getattr(llm_args, "attention_dp_rank", None)
    world = world_of(llm_args)
    if world == 1:
        return owner if isinstance(owner, int) else 0
    found = engine_rank()
    if found is None:
        said = next((env[name] for name in RANK_VARIABLES if env.get(name, "").strip()), None)
        found = int(said) if said is not None and said.strip().isdecimal() else None
    if found is None or not 0 <= found < world:
        raise Refused(
            "tensor_parallel_size",
            world,
            f"this process does not know which of the {world} ranks it is (found {found})",
            f"start it with a launcher that sets one of {', '.join(RANK_VARIABLES)}, or set connector.materialization: "
            "off",
        )
    return found
