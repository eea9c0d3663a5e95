"""`python -m worker_connector.reference_engine`: the reference engine as a Dynamo worker."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dynamo_semkv.telemetry import logs
from dynamo_semkv.telemetry.stderr_lines import stderr_lines
from worker_connector.reference_engine.dynamo_worker.handoff import Role
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.models.model_directory import write_model_directory
from worker_connector.reference_engine.models.presets import SMOLLM2_NAME, TIMED_NAME, TINY_NAME, ModelSource
from worker_connector.reference_engine.timing.cost_model import CostModel
from worker_connector.reference_engine.timing.profile import known_profiles, load_profile

logger = logging.getLogger(__name__)

ENDPOINTS = {
    Role.AGGREGATED: "dynamo.backend.generate",
    Role.PREFILL: "dynamo.prefill.generate",
    Role.DECODE: "dynamo.backend.generate",
}
"""Where Dynamo's own workers of each role serve."""
MODELS = {"tiny": TINY_NAME, "smollm2": SMOLLM2_NAME, "timed": TIMED_NAME}
CONNECTOR = ("worker_connector.connector", "SemkvConnectorScheduler", "SemkvConnectorWorker")
"""As TensorRT-LLM's `kv_connector_config` names it: module, scheduler class, worker class."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker until it ends; returns its exit status, 2 for arguments that are refused."""
    arguments = _parser().parse_args(argv)
    logs.configure(os.environ)
    with stderr_lines(json=logs.json_lines(os.environ)):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        engine = _engine(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    connector = arguments.connector == "on"
    logger.info(
        "reference worker: model %s, %d ranks of %d blocks of %d tokens, %s",
        *(engine.model.name, engine.data_parallel_size, engine.num_blocks, engine.tokens_per_block),
        "with the connector" if connector else "without a connector: no configuration is read (--connector off)",
    )
    model_dir = arguments.model_dir or write_model_directory(engine.model, model_cache())
    # Imported here, because this command alone needs Dynamo; the engine is used without it.
    from worker_connector.reference_engine.dynamo_worker.worker import WorkerSettings, serve

    role = Role(arguments.disaggregation_mode)
    settings = WorkerSettings(
        engine=engine,
        model_dir=model_dir,
        endpoint=arguments.endpoint or ENDPOINTS[role],
        role=role,
        served_name=arguments.served_model_name,
        connector=ConnectorSpec.resolve(*CONNECTOR) if connector else None,
        native_hints=arguments.native_hints,
        offer_model=arguments.offer_model,
        drain_seconds=arguments.drain_seconds,
    )
    return int(uvloop.run(serve(settings)))


def _engine(arguments: argparse.Namespace) -> EngineConfig:
    """ValueError for arguments that do not go together."""
    gpu = _gpu(arguments)
    blocks, budget, batch = arguments.blocks_per_rank, arguments.max_num_tokens, EngineConfig.max_batch_size
    if gpu is not None:
        blocks = blocks or gpu.profile.kv_tokens // arguments.tokens_per_block
        budget, batch = budget or gpu.profile.max_num_tokens, gpu.profile.max_batch_size
    return EngineConfig(
        model=ModelSource(MODELS[arguments.model], config=gpu.profile.page_config if gpu is not None else None),
        tokens_per_block=arguments.tokens_per_block,
        num_blocks=blocks or EngineConfig.num_blocks,
        max_num_tokens=budget or EngineConfig.max_num_tokens,
        max_batch_size=batch,
        data_parallel_size=arguments.data_parallel_size,
        num_threads=arguments.threads,
        gpu=gpu,
    )


def _gpu(arguments: argparse.Namespace) -> CostModel | None:
    if (arguments.model == "timed") != (arguments.profile is not None):
        raise ValueError(
            f"--profile is {arguments.profile!r} and --model {arguments.model!r}; `timed` needs a profile, one of "
            f"{', '.join(known_profiles())} or a file, and no other model takes one"
        )
    return CostModel(load_profile(arguments.profile), arguments.slower) if arguments.profile is not None else None


def model_cache() -> Path:
    """Where model directories are written once."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dynamo-semkv" / "models"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker_connector.reference_engine", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--profile", help="of --model timed: whose time passes and copies take; a name or a YAML file")
    parser.add_argument("--slower", type=float, default=1.0, help="with --profile: multiplies every time")
    parser.add_argument(
        "--model-dir", type=Path, help="directory with tokenizer and chat template; default: in the user's cache"
    )
    parser.add_argument(
        "--endpoint", help="namespace.component.endpoint; default: dynamo.backend.generate, or dynamo.prefill.generate"
    )
    parser.add_argument(
        "--disaggregation-mode",
        choices=[role.value for role in Role],
        default=Role.AGGREGATED.value,
        help="prefill: compute prompts and hand over to a decode worker (no KV moves: that one computes the prompt "
        "again)",
    )
    parser.add_argument(
        "--served-model-name",
        help="name on the model card; prefill workers behind a router need one that no client uses",
    )
    parser.add_argument("--data-parallel-size", type=int, default=2)
    parser.add_argument(
        "--blocks-per-rank", type=int, help="device pages of each rank (256, or as many as the profile holds)"
    )
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--max-num-tokens", type=int, help="token budget of an iteration (512, or the profile's)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a forward pass")
    parser.add_argument("--connector", choices=("on", "off"), default="on", help="options: the file in SEMKV_CONFIG")
    parser.add_argument("--drain-seconds", type=float, default=20.0, help="how long SIGTERM waits for running requests")
    parser.add_argument("--native-hints", action="store_true", help="hand hints to the engine on the request itself")
    parser.add_argument("--offer-model", action="store_true", help="offer the model to clients; default: a router does")
    return parser


if __name__ == "__main__":
    sys.exit(main())
