"""Two scripted engines, one of which pulls from the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dynamo_semkv.config.fetch import FetchConfig
from dynamo_semkv.contracts.hints import FetchHint
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine
from worker_connector.engine_api.settings import Settings
from worker_connector.fetch.peer_fetch import PeerFetch
from worker_connector.fetch.transport import Answer, Rows, Wanted

SECRET = b"a secret of some length"
BLOCK = 4
TOKENS = list(range(1, 22))
"""Five full blocks and one token."""


def fetch_settings(secret: bytes = SECRET, *, slab_bytes: int = MIB, fetch: Any = None, **connector: Any) -> Settings:
    config = FetchConfig(enabled=True, secret_file="of no matter here", **{"deadline_ms": 10_000.0, **(fetch or {})})
    return dataclasses.replace(settings(slab_bytes, **{**OPTIONS, **connector, "fetch": config}), fetch_secret=secret)


def worker(it: Settings | None = None, **options: Any) -> ScriptedEngine:
    """Listens on a port of 127.0.0.1; `end` closes it. Pulls run when `pull` says so."""
    made = ScriptedEngine(it or fetch_settings(), **options)
    desk(made).open(0)
    return made


@contextmanager
def workers(*makers: ScriptedEngine) -> Iterator[tuple[ScriptedEngine, ...]]:
    try:
        yield makers
    finally:
        for maker in makers:
            maker.parts.close()


def desk(engine: ScriptedEngine) -> PeerFetch:
    assert engine.parts.fetch is not None
    return engine.parts.fetch


def hint(source: ScriptedEngine | str, blocks: int = 5) -> FetchHint:
    endpoint = source if isinstance(source, str) else desk(source).endpoint
    assert endpoint is not None
    return FetchHint(source_control_endpoint=endpoint, block_hashes=list(range(blocks)))


def pull(target: ScriptedEngine, source: ScriptedEngine | str, tokens: Sequence[int] = TOKENS, **options: Any) -> int:
    """Begins and runs a pull; how many blocks entered."""
    blocks = options.pop("blocks", 5)
    future = desk(target).fetch(tokens, hint(source, blocks), **options)
    if future is None:
        return 0
    desk(target).fetcher.run_pending()
    return future.result(10)


def results(engine: ScriptedEngine) -> dict[str, int]:
    return dict(desk(engine).fetcher.counts)


class Between:
    """A transport over another one, whose answers a test changes."""

    def __init__(self, inner: Any, *, before: Any = None, after: Any = None) -> None:
        self._inner = inner
        self._before = before
        self._after = after
        self.reads = 0

    def connect(self, host: str, port: int, deadline: float) -> Any:
        outer, source = self, self._inner.connect(host, port, deadline)

        class Source:
            def read(self, wanted: Wanted, into: Rows, deadline: float) -> Answer:
                outer.reads += 1
                if outer._before is not None:
                    wanted = outer._before(wanted) or wanted
                answer: Answer = source.read(wanted, into, deadline)
                return answer if outer._after is None else outer._after(answer, into) or answer

            def close(self) -> None:
                source.close()

        return Source()

    def close(self) -> None:
        self._inner.close()


def between(engine: ScriptedEngine, **changes: Any) -> Between:
    fetcher = desk(engine).fetcher
    fetcher._transport = Between(fetcher._transport, **changes)
    return fetcher._transport


def rows_of(engine: ScriptedEngine) -> dict[bytes, bytes]:
    """Bytes of every resident block by its key."""
    life, _, slab = engine.leader.cache()
    assert life is not None
    assert life.ledger is not None
    assert slab is not None
    return {
        bytes(entry.key): np.asarray(slab.rows[entry.slot, : slab.bytes_per_block]).tobytes()
        for entry in life.ledger.entries()
        if entry.resident
    }
