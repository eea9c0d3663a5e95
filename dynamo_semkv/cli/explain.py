"""`explain` shows everything that is known of a route, of the attempts of a request, or of the last routes.

The router's API has no prompt, token id, salt or key in it, so this has none either.
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
"""In OpenAI's answers Dynamo's context id follows this prefix."""
_MOST_LISTED = 5
MIN_PREFIX = 4
"""Digits of a route id; `status` and the page list eight."""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser."""
    parser = commands.add_parser("explain", help="what became of a route or request, and why", allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "id",
        metavar="ROUTE_OR_REQUEST_ID",
        nargs="?",
        help="a route id, whole or a unique prefix of a recent route's; or the id of a chat completion",
    )
    which.add_argument(
        "--last", metavar="N", type=_count, help="the last N routes that closed, at most as many as the page lists"
    )
    page.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list of routes as they came")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """OK, REFUSED for arguments that cannot be used, FAILED if the page cannot be read or there is no such route."""
    from dynamo_semkv.cli.explain_view import render

    try:
        router = page.Page.of(arguments)
        with router.reading():
            routes = last(router, arguments.last) if arguments.id is None else by_id(router, arguments.id)
            shown = [json.dumps(routes, indent=2)] if arguments.json else [render(route) for route in routes]
    except ContractError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (page.PageError, AmbiguousPrefix) as error:
        print(error, file=sys.stderr)
        return FAILED
    if not routes and arguments.id is not None:
        print(
            f"{router.url}: no closed route of {arguments.id!r}. A route closes when its report has come, or after "
            "outcome.report_ttl_seconds; the record keeps the last outcome.history_size. An id is given whole, or a "
            f"route's by a unique prefix of {MIN_PREFIX} digits or more, if the page lists it among the recent ones",
            file=sys.stderr,
        )
        return FAILED
    if arguments.json:
        print(*shown)
        return OK
    from rich.console import Console

    console = Console()
    for view in shown:
        console.print(view)
    if not routes:
        console.print("No route has closed yet.")
    return OK


class AmbiguousPrefix(Exception):
    """Several recent routes begin with what was asked for; the message lists them."""


def by_id(router: page.Page, wanted: str) -> list[dict[str, Any]]:
    """The closed route of that id, or the attempts of a request. A route id and a request id may look alike, so both
    are asked for, and a prefix of a recent route's id only when neither is there. Raises AmbiguousPrefix."""
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
    return _by_prefix(router, wanted)


def _by_prefix(router: page.Page, wanted: str) -> list[dict[str, Any]]:
    if len(wanted) < MIN_PREFIX or not set(wanted) <= set("0123456789abcdef"):
        return []
    ids = sorted({row["route_id"] for row in router.snapshot()["recent"] if row["route_id"].startswith(wanted)})
    if len(ids) > 1:
        shown = ", ".join(ids[:_MOST_LISTED]) + (", ..." if len(ids) > _MOST_LISTED else "")
        raise AmbiguousPrefix(f"{router.url}: {len(ids)} recent routes begin with {wanted!r}: {shown}")
    found = (router.route(route_id) for route_id in ids)
    return [route for route in found if route is not None]


def last(router: page.Page, count: int) -> list[dict[str, Any]]:
    """The last `count` closed routes, newest first. A route that left the record between two questions is left out."""
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
