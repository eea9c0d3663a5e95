"""Raw bytes to the page: each gets an answer of HTTP or the end of its connection, none shows a fault of ours, and the
page goes on.

Drawn by a seed rather than by Hypothesis: what is shortened would be minutes of sockets.
"""

from __future__ import annotations

import asyncio
import random
from urllib.parse import quote, urlsplit

import pytest

from tests.dashboard.serving import served

METHODS = (b"GET", b"GET", b"GET", b"POST", b"HEAD", b"OPTIONS", b"G\xffT", b"")
PATHS = (
    b"/",
    b"/api/snapshot",
    b"/api/routes/",
    b"/api/requests/",
    b"/metrics",
    b"/readyz",
    b"/../etc/passwd",
    b"/js/main.js",
    b"*",
)
NAMES = (
    b"Host",
    b"Cookie",
    b"Authorization",
    b"Range",
    b"If-None-Match",
    b"Content-Length",
    b"Transfer-Encoding",
    b"X",
)
WORDS = (
    b"",
    b"127.0.0.1",
    b"chunked",
    b"-1",
    b"9" * 400,
    b"Bearer ",
    b"\xff\xfe",
    b"a" * 9_000,
    b"%00%ff",
    b"?token=",
    b"../" * 50,
    b"\x00",
)


def a_request(chance: random.Random) -> bytes:
    def word() -> bytes:
        noise = bytes(chance.randrange(256) for _ in range(chance.randrange(12)))
        return chance.choice(WORDS) + noise.replace(b"\r", b"").replace(b"\n", b"")

    if chance.random() < 0.2:
        return word() + b"\r\n\r\n"
    if chance.random() < 0.5:  # well formed, and odd in what it asks for
        target = chance.choice(PATHS[:-1]) + quote(word()[:200]).encode()
        return b"GET " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    headers = b"".join(chance.choice(NAMES) + b": " + word() + b"\r\n" for _ in range(chance.randrange(4)))
    target = chance.choice(PATHS) + (word() if chance.random() < 0.7 else b"")
    return chance.choice(METHODS) + b" " + target + b" HTTP/1.1\r\n" + headers + b"Connection: close\r\n\r\n"


async def first_line(url: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readline(), 30)
    except ConnectionError:
        return b""  # it was ended, which is an answer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("seed", range(3))
async def test_any_bytes_to_the_page(seed: int) -> None:
    chance = random.Random(seed)
    async with served() as site:
        kinds = set()
        for _ in range(60):
            request = a_request(chance)
            line = await first_line(site.server.url, request)
            assert line == b"" or line[9:10] in (b"2", b"3", b"4"), (request, line)
            kinds.add(line[9:12])
        assert {b"200", b"400", b"404"} <= kinds, kinds
        good = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        assert (await first_line(site.server.url, good)).startswith(b"HTTP/1.1 200")
