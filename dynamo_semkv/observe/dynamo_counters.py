"""Dynamo's own counters of this router's KvRouter, read from the status server of the same process (Dynamo 1.6.1,
`prometheus_names.py`).

    status_url(env) -> str | None       where that server is; None where it is off, or on a port that Dynamo alone knows
    read(url) -> DynamoTokens | None    blocks for at most READ_SECONDS; None: no answer, or none of these counters
    parse(text) -> DynamoTokens | None  pure

They count each routing attempt since the start of the process: cached prefixes of every tier that KV events report, and
what workers report in their streams. They know nothing of donors, hints or outcomes.
"""

from __future__ import annotations

import logging
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

_log = logging.getLogger(__name__)

PREFIX = "dynamo_component_router_"
INPUT = f"{PREFIX}input_sequence_tokens_sum"
BEST_ELIGIBLE = f"{PREFIX}kv_best_eligible_cached_prefix_tokens_total"
SELECTED = f"{PREFIX}kv_selected_cached_prefix_tokens_total"
WORKER_REUSED = f"{PREFIX}kv_worker_reused_tokens_total"
SERIES = (INPUT, BEST_ELIGIBLE, SELECTED, WORKER_REUSED)
MEANINGS = {
    INPUT: "the prompts that were routed: the denominator of the other three",
    BEST_ELIGIBLE: "the longest cached prefix of any eligible worker, of every tier that KV events told of",
    SELECTED: "the prefix cached on the worker and rank that was selected; far below the one before, load or our "
    "pins won",
    WORKER_REUSED: "what workers said in their streams that they reused, loaded blocks included where the engine "
    "counts them",
}

READ_SECONDS = 1.0
MAX_BYTES = 16 * 1024 * 1024
_ANY = frozenset({"", "0.0.0.0", "::"})


@dataclass(frozen=True)
class DynamoTokens:
    """Dynamo's sums, all in tokens. `input_tokens` is the denominator of the other three."""

    input_tokens: int
    best_eligible_tokens: int
    """Cached on the eligible worker that holds most of the prompt, device and lower tiers together."""
    selected_tokens: int
    """Cached on the worker and rank that was chosen."""
    worker_reused_tokens: int
    """What workers report in their streams as reused."""


def status_url(env: Mapping[str, str]) -> str | None:
    """The server's address by DYN_SYSTEM_HOST and DYN_SYSTEM_PORT. None for port 0: Dynamo chooses a port and only logs
    it."""
    port = env.get("DYN_SYSTEM_PORT", "")
    if not port.isascii() or not port.isdigit() or int(port) == 0:
        return None
    host = env.get("DYN_SYSTEM_HOST", "")
    host = "127.0.0.1" if host in _ANY else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def parse(text: str) -> DynamoTokens | None:
    """Sums over models and phases. None before the first request was routed: then the series do not exist."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in SERIES:
            try:
                sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
            except (IndexError, ValueError):
                continue  # not a sample as Prometheus writes one
    if INPUT not in sums or not all(map(math.isfinite, sums.values())):
        return None
    return DynamoTokens(*(int(sums.get(name, 0.0)) for name in SERIES))


def read(url: str) -> DynamoTokens | None:
    """Reads the counters over HTTP, without a proxy. Blocks for up to READ_SECONDS; None: no answer, or no such
    counters."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/metrics", timeout=READ_SECONDS) as answer:
            return parse(answer.read(MAX_BYTES).decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError) as error:
        _log.debug("Dynamo's status server at %s did not answer: %s", url, error)
        return None
