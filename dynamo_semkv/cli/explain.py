"""`explain`: everything that is known of a route, of the attempts of a request, or of the last routes.

What the router's API tells has no prompt, token id, salt or key in it, so neither has this.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from dynamo_semkv.cli import page
from dynamo_semkv.cli.exit_status import FAILED, OK, REFUSED
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import check_route_id

CHAT_PREFIX = "chatcmpl-"
"""OpenAI's answers carry Dynamo's context id behind it."""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("explain", help="what became of a route or request, and why", allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "id", metavar="ROUTE_OR_REQUEST_ID", nargs="?", help="a route id, or the id of a chat completion"
    )
    which.add_argument(
        "--last", metavar="N", type=_count, help="the last N routes that closed, at most as many as the page lists"
    )
    page.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list of routes as they came")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        router = page.Page.of(arguments)
        routes = last(router, arguments.last) if arguments.id is None else by_id(router, arguments.id)
    except ContractError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except page.PageError as error:
        print(error, file=sys.stderr)
        return FAILED
    if not routes and arguments.id is not None:
        print(
            f"{router.url}: no closed route of {arguments.id!r}. A route closes when its report has come, or after "
            "outcome.report_ttl_seconds; the record keeps the last outcome.history_size",
            file=sys.stderr,
        )
        return FAILED
    if arguments.json:
        print(json.dumps(routes, indent=2))
        return OK
    from rich.console import Console

    from dynamo_semkv.cli.explain_view import render

    console = Console()
    for route in routes:
        console.print(render(route))
    if not routes:
        console.print("No route has closed yet.")
    return OK


def by_id(router: page.Page, wanted: str) -> list[dict[str, Any]]:
    """A route, or the attempts of a request; a route id and a request id may look alike, so both are asked for."""
    try:
        route = router.route(check_route_id(wanted))
    except ContractError:
        route = None  # then it can only be a request's
    if route is not None:
        return [route]
    for request_id in _request_ids(wanted):
        found = router.request(request_id)
        if found:
            return found
    return []


def last(router: page.Page, count: int) -> list[dict[str, Any]]:
    """Newest first. A route that fell out of the record between two questions is left out."""
    rows = router.snapshot()["recent"][:count]
    found = (router.route(row["route_id"]) for row in rows)
    return [route for route in found if route is not None]


def _request_ids(wanted: str) -> Iterator[str]:
    yield wanted
    if wanted.startswith(CHAT_PREFIX) and wanted != CHAT_PREFIX:
        yield wanted[len(CHAT_PREFIX) :]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a whole number from 1")
    return int(text)
