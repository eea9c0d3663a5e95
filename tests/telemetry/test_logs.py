"""Log lines: both forms, levels as Dynamo reads them, and the route on every line about a route."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dynamo_semkv.telemetry import logs
from dynamo_semkv.telemetry.logs import about, bind, configure, json_lines, levels

CONTEXT = f"00-{'ab' * 16}-{'cd' * 8}-01"
Say = Callable[..., io.StringIO]


@pytest.fixture
def output() -> Iterator[Say]:
    """`output(DYN_LOG=...)` configures this process's root logger anew, as a process does at its start."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def configured(chosen: str | None = None, **env: str) -> io.StringIO:
        stream = io.StringIO()
        configure(env, chosen, stream)
        return stream

    yield configured
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("semkv.test.quiet").setLevel(logging.NOTSET)
    logs._bound.set({})


@pytest.mark.parametrize(
    ("env", "json_form"),
    [
        ({}, False),
        ({"DYN_LOGGING_JSONL": "1"}, True),
        ({"DYN_LOGGING_JSONL": "true"}, True),
        ({"DYN_LOGGING_JSONL": "0"}, False),
        ({"DYN_LOGGING_CONSOLE_FORMAT": " jsonl "}, True),
        ({"DYN_LOGGING_CONSOLE_FORMAT": "readable", "DYN_LOGGING_JSONL": "1"}, False),
        ({"DYN_LOGGING_CONSOLE_FORMAT": " ", "DYN_LOGGING_JSONL": "1"}, True),
    ],
)
def test_the_form_is_chosen_as_dynamo_chooses_it(env: dict[str, str], json_form: bool) -> None:
    assert json_lines(env) is json_form


@pytest.mark.parametrize(
    ("directives", "root", "targets"),
    [
        ("", logging.INFO, {}),
        ("debug", logging.DEBUG, {}),
        ("WARN", logging.WARNING, {}),
        ("info,dynamo_semkv::router=debug", logging.INFO, {"dynamo_semkv.router": logging.DEBUG}),
        ("dynamo_semkv=trace,error", logging.ERROR, {"dynamo_semkv": logging.DEBUG}),
        ("nonsense,a=nonsense", logging.INFO, {}),
    ],
)
def test_levels_are_read_from_dyn_log(directives: str, root: int, targets: dict[str, int]) -> None:
    assert levels(directives) == (root, targets)


def test_a_json_line_has_dynamos_fields_and_the_route(output: Say) -> None:
    stream = output(DYN_LOGGING_JSONL="1")
    log = logging.getLogger("dynamo_semkv.test")
    with about(request_id="req", traceparent=CONTEXT, route_id="r1"):
        log.warning("pin to %d given\nup", 7)
    log.info("no route")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "WARN",
        "target": "dynamo_semkv.test",
        "message": "pin to 7 given\nup",
        "request_id": "req",
        "route_id": "r1",
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
    }
    assert set(second) == {"time", "level", "target", "message"}


def test_a_traceback_stays_in_its_line(output: Say) -> None:
    stream = output(DYN_LOGGING_JSONL="1")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("semkv.test").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_a_readable_line_ends_with_the_route(output: Say) -> None:
    stream = output()
    with about(route_id="r1", traceparent=CONTEXT):
        logging.getLogger("semkv.test").info("hello")
    assert stream.getvalue().endswith(f"INFO semkv.test: hello route_id=r1 trace_id={'ab' * 16} span_id={'cd' * 8}\n")


def test_a_level_of_the_command_line_stands_before_dyn_log(output: Say) -> None:
    stream = output("warning", DYN_LOG="debug,semkv.test.quiet=error")
    logging.getLogger("semkv.test").info("unseen")
    logging.getLogger("semkv.test.quiet").warning("unseen too")
    logging.getLogger("semkv.test").warning("seen")
    assert [line.split(": ")[-1] for line in stream.getvalue().splitlines()] == ["seen"]


async def test_tasks_keep_their_fields_apart(output: Say) -> None:
    stream = output(DYN_LOGGING_JSONL="1")
    log = logging.getLogger("semkv.test")

    async def serve(number: int) -> None:
        bind(fresh=True, request_id=f"request-{number}")
        await asyncio.sleep(0)
        bind(route_id=f"route-{number}")
        await asyncio.sleep(0)
        log.info("%d", number)

    await asyncio.gather(*(asyncio.ensure_future(serve(number)) for number in range(5)))
    lines: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 5
    for line in lines:
        assert (line["request_id"], line["route_id"]) == (f"request-{line['message']}", f"route-{line['message']}")


def test_what_is_no_trace_context_is_left_out(output: Say) -> None:
    stream = output(DYN_LOGGING_JSONL="1")
    with about(request_id="", traceparent="garbage\ninjected"):
        logging.getLogger("semkv.test").info("hello")
    assert set(json.loads(stream.getvalue())) == {"time", "level", "target", "message"}


def test_a_stream_that_was_closed_is_no_fault_of_whoever_logs() -> None:
    stream = io.StringIO()
    logs.configure({}, stream=stream)
    stream.close()
    logging.getLogger("dynamo_semkv.test").warning("nobody reads this")
