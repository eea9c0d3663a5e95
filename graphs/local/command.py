"""The command line of the local graph: `up` (when none is named) and `demo`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from graphs.local import demo
from graphs.local.graph import GraphError, LocalGraph
from graphs.local.settings import GIVES_WAY, LOW_GATE, MODELS, GraphSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb; exit status 2 for refused arguments, 1 if the graph did not come up, 130 after Ctrl-C."""
    arguments = _parser().parse_args(_with_verb(sys.argv[1:] if argv is None else argv))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell started us in the background
    try:
        settings = GraphSettings(
            model=arguments.model,
            profile=arguments.profile,
            slower=arguments.slower,
            workers=arguments.workers,
            routers=arguments.routers,
            mode=arguments.mode,
            connector=arguments.connector == "on",
            blocks_per_rank=arguments.blocks_per_rank or (None if arguments.profile else GraphSettings.blocks_per_rank),
            max_num_tokens=None if arguments.profile else GraphSettings.max_num_tokens,
            engine_niceness=0 if arguments.profile else arguments.engine_niceness,
            overrides=LOW_GATE if arguments.command == "demo" else {},  # shows the engine decline, too
            otlp_endpoint=arguments.otlp_endpoint,
            observability=arguments.observability,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    try:
        if arguments.command == "demo":
            return demo.run(settings, keep=arguments.keep, run_dir=arguments.run_dir, model_dir=arguments.model_dir)
        graph = LocalGraph(settings, run_dir=arguments.run_dir, model_dir=arguments.model_dir)
        demo.bring_up(graph, console)
        try:
            if arguments.print_env:
                print(*graph.shell_exports(), sep="\n", flush=True)
            demo.wait_for_interrupt(graph, console)
        finally:
            graph.down()
        return 0
    except GraphError as error:
        print(f"the graph did not come up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _with_verb(argv: Sequence[str]) -> list[str]:
    """Options alone mean `up`."""
    asks_for_help = any(argument in ("-h", "--help") for argument in argv)
    return list(argv) if argv and (asks_for_help or not argv[0].startswith("-")) else ["up", *argv]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m graphs.local",
        description="The whole graph on this machine. Without a verb: up.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the graph and keep it until Ctrl-C (the default)", allow_abbrev=False)
    show = commands.add_parser("demo", help="start the graph, send the workload, print the table", allow_abbrev=False)
    up.add_argument("--print-env", action="store_true", help="print the environment for more workers and tools")
    show.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=sys.stdin.isatty(),
        help="leave the graph and its page up until Ctrl-C; default: yes on a terminal",
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dynamo-semkv" / "models"
    for command in (up, show):
        command.add_argument("--model", choices=sorted(MODELS), default="smollm2")
        command.add_argument("--profile", help="of --model timed: the GPU whose time the engine takes")
        command.add_argument("--slower", type=float, default=1.0, help="with --profile: multiplies every time")
        command.add_argument("--workers", type=int, default=2)
        command.add_argument("--routers", type=int, default=1)
        command.add_argument("--mode", choices=("off", "shadow", "canary", "enforce"), default="enforce")
        command.add_argument(
            "--otlp-endpoint",
            metavar="URL",
            help="send spans to this collector (OTLP over HTTP); logs become JSON lines",
        )
        command.add_argument(
            "--observability",
            action="store_true",
            help="also Prometheus and, where it is installed, Grafana, both provisioned",
        )
        command.add_argument("--connector", choices=("on", "off"), default="on")
        command.add_argument(
            "--blocks-per-rank", type=int, help="device pages a rank (72, or as many as the profile holds)"
        )
        command.add_argument(
            "--engine-niceness",
            type=int,
            default=GIVES_WAY,
            help="0 to 19: how far engines give way",
        )
        command.add_argument(
            "--run-dir", type=Path, help="for logs, discovery and the broker's store; default: a temporary one"
        )
        command.add_argument("--model-dir", type=Path, default=cache, help="where model directories are written once")
    return parser
