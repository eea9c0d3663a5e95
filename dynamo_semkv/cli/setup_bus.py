"""`setup-bus` makes the streams on the broker, once, as a user that may; routers and workers then run with
`bus.manage_streams: false`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from dynamo_semkv.cli import configuration
from dynamo_semkv.cli.exit_status import FAILED, OK, REFUSED


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser."""
    parser = commands.add_parser("setup-bus", help="make or update the streams on the broker", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", default=configuration.default_path(), help=configuration.HELP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """OK with a line for each stream, REFUSED for the configuration, FAILED if the broker refused or did not answer."""
    from dynamo_semkv.bus.setup import BusError, set_up

    loaded = configuration.load_or_report(arguments.config)
    if loaded is None:
        return REFUSED
    try:
        streams = asyncio.run(set_up(loaded.config.bus))
    except BusError as error:
        print(error, file=sys.stderr)
        return FAILED
    for stream in streams:
        print(
            f"{stream.name}: {stream.messages} messages, {stream.bytes} bytes, kept {stream.max_age_seconds:.0f} s, "
            f"{stream.replicas} replica{'s' if stream.replicas != 1 else ''}"
        )
    return OK
