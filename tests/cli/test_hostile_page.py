"""What answers at `--url` may be anything: one sentence and an exit status, whatever it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo_semkv.cli import main
from dynamo_semkv.cli.exit_status import FAILED, REFUSED
from dynamo_semkv.observe.snapshot import SCHEMA, build_snapshot
from tests.observe.fake_state import fake_state

VERBS = (["status"], ["status", "--json"], ["explain", "a" * 32], ["explain", "abcd"], ["explain", "--last", "2"])
Captured = pytest.CaptureFixture[str]


@asynccontextmanager
async def answering(data: bytes) -> AsyncIterator[str]:
    """A server that says this to everybody, and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(data)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def http(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


async def one_sentence(verb: list[str], url: str, capsys: Captured) -> str:
    assert await asyncio.to_thread(main, [*verb, "--url", url]) == FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err[:-1].isprintable()
    assert len(captured.err) < 1_000
    return captured.err


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1b[2JXYZ\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
        b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
        http(b"[" * 200_000),
        http(b'{"a":' * 200_000),
        http(b'\xff{"schema":1}'),
        http(b'{"error":"\\u001b[31m' + b"x" * 100_000 + b'"}', b"500 no"),
        http(b'{"schema": NaN}'),
        http(b'{"schema": "\\u001b[2J' + b"x" * 100_000 + b'"}'),
    ],
    ids=lambda data: repr(data[:48]),
)
@pytest.mark.parametrize("verb", [["status"], ["explain", "a" * 32]], ids=" ".join)
async def test_answer_that_is_no_page(verb: list[str], data: bytes, capsys: Captured) -> None:
    async with answering(data) as url:
        assert url in await one_sentence(verb, url, capsys)


def lists(snapshot: dict[str, Any]) -> None:
    snapshot.update({key: [1] for key in snapshot if key != "schema"})


def numbers(snapshot: dict[str, Any]) -> None:
    snapshot.update({key: 7 for key in snapshot if key != "schema"})


@pytest.mark.parametrize("spoil", [lambda s: [s.pop(key) for key in list(s) if key != "schema"], lists, numbers])
@pytest.mark.parametrize("verb", [v for v in VERBS if v != ["status", "--json"]], ids=" ".join)
async def test_right_format_of_a_wrong_shape(
    verb: list[str], spoil: Callable[[dict[str, Any]], None], capsys: Captured
) -> None:
    snapshot = build_snapshot(fake_state())
    spoil(snapshot)
    async with answering(http(json.dumps(snapshot).encode())) as url:
        assert f"format {SCHEMA}" in await one_sentence(verb, url, capsys)


@pytest.mark.parametrize("routes", [b"{}", b'{"routes": 7}', b'{"routes": [7]}', b'{"routes": [{}]}'])
async def test_request_of_a_wrong_shape(routes: bytes, capsys: Captured) -> None:
    async with answering(http(routes)) as url:
        await one_sentence(["explain", "chatcmpl-x"], url, capsys)


@pytest.mark.parametrize("checks", [7, [7], [{}], [{"name": "\x1b[2J", "level": "x", "detail": 1}]])
async def test_doctor_says_it_as_a_finding(checks: Any, capsys: Captured) -> None:
    snapshot = {"schema": SCHEMA, "readiness": {"checks": checks}}
    async with answering(http(json.dumps(snapshot).encode())) as url:
        assert await asyncio.to_thread(main, ["doctor", "--url", url]) == FAILED
    captured = capsys.readouterr()
    assert "fail  page: " in captured.out
    assert captured.err == ""
    assert captured.out.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://h:abc",
        "http://h:99999999",
        "http://h/\x00",
        "http://h/ a",
        "http://h/\n",
        "\x1bhttp://h",
        "http://\u2100.x",
        "http://:80",
        "http://127.0.0.1:1/\u00e9",
        "http://" + chr(0xD800) + ":1",
        "http://:secret@127.0.0.1:1",
    ],
    ids=ascii,
)
def test_what_is_no_url_of_a_page(url: str, capsys: Captured) -> None:
    assert main(["status", "--url", url]) == REFUSED
    error = capsys.readouterr().err
    assert error.startswith("--url: got ")
    assert error.count("\n") == 1


async def test_host_that_is_no_name(capsys: Captured) -> None:
    await one_sentence(["status"], "http://" + "a" * 70 + ".x:1", capsys)
