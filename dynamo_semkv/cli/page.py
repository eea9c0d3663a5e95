"""Reads a router's page over HTTP; it changes nothing there.

    Page(url, token).snapshot() -> dict     .route(route_id) -> dict | None     .request(request_id) -> list[dict]

PageError says in one sentence what is wrong and what to do. Proxies of the environment are not used and redirects are
not followed: a token goes to the address that was given and nowhere else. The answers are not trusted: an error shows
their text cleaned and cut, and they are rendered within `Page.reading()`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import SplitResult, quote, urlsplit

from dynamo_semkv.cli.text import clean
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.dashboard.access import read_token
from dynamo_semkv.observe.snapshot import SCHEMA

TOKEN_VARIABLE = "SEMKV_DASHBOARD__TOKEN_FILE"
TIMEOUT_SECONDS = 10.0
MAX_BYTES = 64 * 1024 * 1024
_MAX_SHOWN = 200
_NOT_A_PAGE = "something answers there, but it is not the page of a dynamo_semkv router"


class PageError(Exception):
    """The page could not be read; the message begins with its address."""


class _NotFound(Exception):
    pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds `--url` and `--token-file`, for `Page.of`."""
    parser.add_argument(
        "--url",
        required=required,
        metavar="URL",
        help="the router's page; its log says `dashboard: http://127.0.0.1:PORT`",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"the router's dashboard.token_file, where it has one; default: ${TOKEN_VARIABLE}",
    )


class Page:
    """The page of one router. Every method that asks it raises PageError."""

    def __init__(self, url: str, token: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Raises ContractError for a URL that cannot be a page's."""
        parts = _split(url)
        if parts is None:
            raise ContractError("--url", url, "http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout = timeout_seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Page:
        """From what `add_arguments` added. Raises ContractError for a URL or a token file that cannot be used."""
        token = read_token(arguments.token_file) if arguments.token_file is not None else None
        return cls(arguments.url, token)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps code that uses an answer: whatever the answer lacks becomes a PageError. Only for pure code, or a fault
        of ours is taken for the page's."""
        try:
            yield
        except ContractError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self._shapeless(f"{type(error).__name__}: {error}") from error

    def snapshot(self) -> dict[str, Any]:
        """What `/api/snapshot` shows. PageError also for another format than this version reads."""
        found: dict[str, Any] = self._get("/api/snapshot", "snapshot")
        if found.get("schema") != SCHEMA:
            raise PageError(
                f"{self.url}: it shows format {_short(repr(found.get('schema')))}, this command reads format {SCHEMA}: "
                "use the command of the router's own version"
            )
        return found

    def route(self, route_id: str) -> dict[str, Any] | None:
        """None when no such route is closed and still kept."""
        try:
            found: dict[str, Any] = self._get(f"/api/routes/{quote(route_id, safe='')}", "route")
        except _NotFound:
            return None
        return found

    def request(self, request_id: str) -> list[dict[str, Any]]:
        """The closed routes of a request id, one an attempt, each with which `request` of how many `requests` with that
        id it belongs to; empty when there is none."""
        found = self._get(f"/api/requests/{quote(request_id, safe='')}", "request").get("routes")
        if not isinstance(found, list) or not all(isinstance(route, dict) for route in found):
            raise self._shapeless("routes: no list of routes")
        return found

    def _get(self, path: str, what: str) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return self._parsed(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, what) from None
        except urllib.error.URLError as error:
            raise self._away(error.reason) from None
        except http.client.HTTPException as error:
            raise PageError(f"{self.url}: {_NOT_A_PAGE} ({type(error).__name__})") from None
        except (OSError, ValueError) as error:
            raise self._away(error) from None

    def _parsed(self, answer: IO[bytes]) -> dict[str, Any]:
        body = answer.read(MAX_BYTES + 1)
        try:
            value = json.loads(body) if len(body) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise PageError(f"{self.url}: {_NOT_A_PAGE}")
        return value

    def _refused(self, error: urllib.error.HTTPError, what: str) -> Exception:
        if error.code == 401:
            return PageError(f"{self.url}: it wants the token: --token-file FILE, the router's dashboard.token_file")
        try:
            answer = self._parsed(error).get("error")
        except (PageError, OSError, http.client.HTTPException):
            answer = None
        if not isinstance(answer, str):
            return PageError(f"{self.url}: {_NOT_A_PAGE} (status {error.code})")
        if error.code == 404 and what == "route":
            return _NotFound(answer)
        return PageError(f"{self.url}: status {error.code}: {_short(answer)}")

    def _shapeless(self, what: str) -> PageError:
        return PageError(
            f"{self.url}: it answers in another shape than format {SCHEMA} has ({_short(what)}): is it a dynamo_semkv "
            "router's page, of this version?"
        )

    def _away(self, reason: object) -> PageError:
        return PageError(
            f"{self.url}: no router's page answers ({_short(str(reason))}): is the router up, and is it this port? Its "
            "log says `dashboard: http://...`"
        )


def _split(url: str) -> SplitResult | None:
    """None for what cannot be a page's URL, or has a user or a password in it."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError for what is no port
    except ValueError:
        return None
    printable = url.isprintable() and " " not in url and (parts.path + parts.query).isascii()
    named = parts.scheme in ("http", "https") and parts.hostname and parts.username is None and parts.password is None
    return parts if printable and named else None


def _short(text: str) -> str:
    """A text of somebody else, cleaned and cut for a sentence of ours."""
    shown = clean(text)
    return shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."
