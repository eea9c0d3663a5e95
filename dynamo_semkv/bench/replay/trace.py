"""A trace of requests as chains of blocks: equal ids mean equal blocks behind an equal prefix, as in Mooncake's traces
(FAST'25)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo_semkv.contracts.errors import ContractError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    number: int
    at: float
    """Seconds since the first request."""
    chain: tuple[int, ...]
    """The full blocks of the prompt, one id each."""
    tokens: int
    """Tokens of the prompt; at least those of the chain."""


def read_mooncake(path: Path, *, scale: int = 1, limit: int | None = None, speed: float = 1.0) -> list[TraceRequest]:
    """The requests of a file. `scale` divides every length (512-token blocks become `512 / scale`), `speed` divides the
    times. ContractError names the line."""
    if MOONCAKE_BLOCK_TOKENS % scale or scale < 1:
        raise ContractError("scale", scale, f"a divisor of {MOONCAKE_BLOCK_TOKENS}")
    if not speed > 0:
        raise ContractError("speed", speed, "more than 0")
    block = MOONCAKE_BLOCK_TOKENS // scale
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            try:
                raw = json.loads(line)
                length, ids, at = int(raw["input_length"]), [int(i) for i in raw["hash_ids"]], float(raw["timestamp"])
            except (ValueError, KeyError, TypeError) as error:
                raise ContractError(
                    f"{path.name} line {number + 1}", line[:80], "timestamp, input_length and hash_ids"
                ) from error
            full = length // MOONCAKE_BLOCK_TOKENS
            found.append(
                TraceRequest(number, at / 1000.0 / speed, tuple(ids[:full]), max(1, length // scale, full * block))
            )
    if not found:
        raise ContractError("trace", str(path), "at least one request")
    return found


def synthetic(
    requests: int, *, seed: int = 0, documents: int = 400, blocks: int = 24, rate: float = 4.0, block_tokens: int = 512
) -> list[TraceRequest]:
    """Conversations over documents, drawn by Zipf's law: a turn repeats the document and the turns before it. Poisson
    arrivals at `rate` a second."""
    rng = random.Random(seed)
    weights = [1.0 / (rank + 1) for rank in range(documents)]
    chains: dict[int, list[int]] = {}
    ids = iter(range(10**9, 2 * 10**9))
    at, found = 0.0, []
    for number in range(requests):
        at += rng.expovariate(rate)
        document = rng.choices(range(documents), weights)[0]
        chain = chains.setdefault(document, [document * blocks + n for n in range(blocks)])
        if len(chain) > 2 * blocks:
            del chain[blocks:]
        chain.append(next(ids))
        found.append(TraceRequest(number, at, tuple(chain), len(chain) * block_tokens + rng.randrange(block_tokens)))
    return found


def repeated_share(trace: list[TraceRequest]) -> float:
    """Share of the blocks that an endless cache would have: the most that exact prefix reuse can save."""
    seen: set[int] = set()
    hits = total = 0
    for request in trace:
        hits += sum(1 for _ in _known(request.chain, seen))
        total += len(request.chain)
        seen.update(request.chain)
    return hits / total if total else 0.0


def _known(chain: tuple[int, ...], seen: set[int]) -> Iterator[int]:
    for block in chain:
        if block not in seen:
            return
        yield block
