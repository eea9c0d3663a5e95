"""`serve` runs the router. It is the only verb that needs an installed Dynamo."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from dynamo_semkv.cli import configuration
from dynamo_semkv.cli.exit_status import REFUSED
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.telemetry import logs
from dynamo_semkv.telemetry.stderr_lines import stderr_lines


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser."""
    parser = commands.add_parser("serve", help="serve the public model in front of the workers", allow_abbrev=False)
    parser.add_argument("--config", "-c", metavar="FILE", default=configuration.default_path(), help=configuration.HELP)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="default: what DYN_LOG says, else info"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; REFUSED for a configuration that cannot be used."""
    logs.configure(os.environ, arguments.log_level)
    with stderr_lines(json=logs.json_lines(os.environ)):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    loaded = configuration.load_or_report(arguments.config)
    if loaded is None:
        return REFUSED
    from dynamo_semkv.router.process import run as serve

    try:
        return serve(loaded)
    except ContractError as error:
        print(f"{loaded.source}: {error}", file=sys.stderr)
        return REFUSED
