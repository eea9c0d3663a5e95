"""`status` shows what the page shows, in a terminal or as JSON. The numbers are those of `/api/snapshot`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dynamo_semkv.cli import page
from dynamo_semkv.cli.exit_status import FAILED, OK, REFUSED
from dynamo_semkv.contracts.errors import ContractError


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser."""
    parser = commands.add_parser(
        "status", help="what a running router sees: the page, in a terminal", allow_abbrev=False
    )
    page.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the snapshot as it came")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """OK, REFUSED for arguments that cannot be used, FAILED if the page cannot be read."""
    from dynamo_semkv.cli.status_view import render

    try:
        router = page.Page.of(arguments)
        snapshot = router.snapshot()
        with router.reading():
            shown = json.dumps(snapshot, indent=2) if arguments.json else render(snapshot)
    except ContractError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except page.PageError as error:
        print(error, file=sys.stderr)
        return FAILED
    if arguments.json:
        print(shown)
        return OK
    from rich.console import Console

    Console().print(shown)
    return OK
