"""The entry point: parses arguments, runs the verb, returns the exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from dynamo_semkv import __version__
from dynamo_semkv.cli.bench import add as add_bench
from dynamo_semkv.cli.check_config import add as add_check_config
from dynamo_semkv.cli.doctor import add as add_doctor
from dynamo_semkv.cli.exit_status import OK, PIPE_CLOSED, REFUSED
from dynamo_semkv.cli.explain import add as add_explain
from dynamo_semkv.cli.serve import add as add_serve
from dynamo_semkv.cli.setup_bus import add as add_setup_bus
from dynamo_semkv.cli.status import add as add_status
from dynamo_semkv.config.extras import remedy

VERBS = (add_serve, add_check_config, add_setup_bus, add_doctor, add_status, add_explain, add_bench)
"""Each adds the parser of its verb and sets `run(arguments) -> int` as that parser's default."""

_OWN = ("dynamo_semkv", "worker_connector", "graphs")

__all__ = ["OK", "REFUSED", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, a value of `exit_status`. The reader of what is printed may go away early (`| head`);
    that is no error."""
    try:
        try:
            arguments = _parser().parse_args(argv)
            run: Callable[[argparse.Namespace], int] = arguments.run
            return _with_what_is_installed(run, arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # not at the interpreter's end, where a closed pipe cannot be caught
    except BrokenPipeError:
        _close_stdout()
        return PIPE_CLOSED


def _with_what_is_installed(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", *_OWN):
            raise
        how = "ai-dynamo 1.6.x" if missing == "dynamo" else remedy("router")
        print(f"{arguments.command}: {missing!r} is not installed here, and this needs it: {how}", file=sys.stderr)
        return REFUSED


def _close_stdout() -> None:
    """Discards what is still buffered for a closed pipe: the interpreter flushes at its end, and would complain."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo_semkv", description="Semantic KV placement for NVIDIA Dynamo.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in VERBS:
        add(commands)
    return parser
