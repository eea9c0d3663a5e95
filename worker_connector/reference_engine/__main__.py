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
from worker_connector.reference_engine.models.presets import SMOLLM2_NAME, TINY_NAME, ModelSource

logger = logging.getLogger(__name__)

ENDPOINTS = {
    Role.AGGREGATED: "dynamo.backend.generate",
    Role.PREFILL: "dynamo.prefill.generate",
    Role.DECODE: "dynamo.backend.generate",
}
"""Where Dynamo's own workers of each role serve."""
MODELS = {"tiny": TINY_NAME, "smollm2": SMOLLM2_NAME}
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
        engine = EngineConfig(
            model=ModelSource(MODELS[arguments.model]),
            tokens_per_block=arguments.tokens_per_block,
            num_blocks=arguments.blocks_per_rank,
            max_num_tokens=arguments.max_num_tokens,
            data_parallel_size=arguments.data_parallel_size,
            num_threads=arguments.threads,
        )
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


def model_cache() -> Path:
    """Where model directories are written once."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dynamo-semkv" / "models"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker_connector.reference_engine", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
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
    parser.add_argument("--blocks-per-rank", type=int, default=256, help="device pages of each rank")
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--max-num-tokens", type=int, default=512, help="token budget of one iteration")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a forward pass")
    parser.add_argument("--connector", choices=("on", "off"), default="on", help="options: the file in SEMKV_CONFIG")
    parser.add_argument("--drain-seconds", type=float, default=20.0, help="how long SIGTERM waits for running requests")
    parser.add_argument("--native-hints", action="store_true", help="hand hints to the engine on the request itself")
    parser.add_argument("--offer-model", action="store_true", help="offer the model to clients; default: a router does")
    return parser


if __name__ == "__main__":
    sys.exit(main())
