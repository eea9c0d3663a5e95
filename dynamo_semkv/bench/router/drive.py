"""Requests a second through each router, in slices that alternate, so that other load of the machine hits all of them
alike."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from dynamo_semkv.bench.router.graph import BARE, OURS, RUST, RouterGraph, document
from dynamo_semkv.bench.router.model_dir import text

CONTENDERS = (RUST, BARE, OURS)


@dataclass
class Slices:
    """The figures of one contender, one value per round."""

    per_second: list[float] = field(default_factory=list)
    ttft_p50_ms: list[float] = field(default_factory=list)
    processor_ms: list[float] = field(default_factory=list)
    """Processor time per request of the process that routes; for Rust that is the frontend itself, which is not
    comparable."""
    failed: int = 0


@dataclass(frozen=True)
class Throughput:
    """The figures of one graph; `log_errors`: lines at ERROR in its logs."""

    ranks: int
    tokens: int
    max_tokens: int
    concurrency: int
    rounds: int
    contenders: dict[str, Slices]
    log_errors: int

    def ratio(self, of: str, over: str) -> float:
        """Median over the rounds of one contender's rate over the other's in the same round."""
        pairs = zip(self.contenders[of].per_second, self.contenders[over].per_second, strict=True)
        return statistics.median(left / right if right else 0.0 for left, right in pairs)


def throughput(
    *, ranks: int, donors: int, tokens: int, max_tokens: int, concurrency: int, rounds: int, seconds: float
) -> Throughput:
    """Measures `rounds` slices of `seconds` for each contender. GraphError if the processes do not come up."""
    found = {name: Slices() for name in CONTENDERS}
    numbers = itertools.count()
    with RouterGraph(ranks=ranks, donors=donors, tokens=tokens) as graph:
        for at in range(rounds):
            order = CONTENDERS if at % 2 == 0 else CONTENDERS[::-1]
            for name in order:
                used = graph.processor_seconds(name)
                done = asyncio.run(_slice(graph, name, numbers, max_tokens, concurrency, seconds))
                used = graph.processor_seconds(name) - used
                slices = found[name]
                slices.failed += done.failed
                slices.per_second.append(len(done.ttft) / done.seconds)
                slices.ttft_p50_ms.append(1e3 * statistics.median(done.ttft) if done.ttft else 0.0)
                slices.processor_ms.append(1e3 * used / max(1, len(done.ttft)))
        errors = graph.errors()
    return Throughput(ranks, tokens, max_tokens, concurrency, rounds, found, errors)


@dataclass
class _Done:
    ttft: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0


async def _slice(
    graph: RouterGraph, model: str, numbers: Iterator[int], max_tokens: int, concurrency: int, seconds: float
) -> _Done:
    done, began = _Done(), time.monotonic()
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            while time.monotonic() - began < seconds:
                await _one(session, graph, model, next(numbers), max_tokens, done)

        await asyncio.gather(*(client() for _ in range(concurrency)))
    done.seconds = time.monotonic() - began
    return done


async def _one(
    session: aiohttp.ClientSession, graph: RouterGraph, model: str, number: int, max_tokens: int, done: _Done
) -> None:
    body = _body(graph, model, number, max_tokens)
    sent, first = time.monotonic(), None
    try:
        async with session.post(graph.url(model), data=body, headers={"content-type": "application/json"}) as answer:
            async for _ in answer.content:
                first = first or time.monotonic()
        if answer.status != 200 or first is None:
            done.failed += 1
            return
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        done.failed += 1
        return
    done.ttft.append(first - sent)


def _body(graph: RouterGraph, model: str, number: int, max_tokens: int) -> bytes:
    """The request's JSON. No prompt comes twice. The first half of every second one is a donor's."""
    ids = document(2**40 + number, graph.tokens)
    if number % 2 == 0 and graph.donors:
        half = graph.tokens // 2
        ids[:half] = document(number // 2 % graph.donors, graph.tokens)[:half]
    message = {"role": "user", "content": text(ids.tolist())}
    asked = {"model": model, "messages": [message], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return json.dumps(asked).encode()
