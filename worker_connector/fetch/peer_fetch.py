"""PeerFetch: where a worker's hints to pull come in, and where other workers come for its blocks. One a leader; puts
the parts together.

A hint comes in twice: from whoever takes requests in, before the engine sees them (`fetch`), so that its blocks can be
there in time; and on the request itself, where the engine carries hints (`asked`), for the requests that come after it.
Under tensor parallelism there is none (engine_api/settings.py): a block is then spread over the slabs of several
processes, which would have to pull and enter it in step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from dynamo_semkv.config.fetch import FetchConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import FetchHint
from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.engine_api.request_view import RequestScope, pack_tokens
from worker_connector.fetch.client import TcpTransport
from worker_connector.fetch.export import Held, SlabExport
from worker_connector.fetch.fetcher import Fetcher, Order
from worker_connector.fetch.peers import Peers, endpoint
from worker_connector.fetch.server import FetchServer
from worker_connector.fetch.tier import FetchTier
from worker_connector.fetch.transport import BlockTransport
from worker_connector.leader.leader import Leader
from worker_connector.ledger.block import BlockEntry
from worker_connector.requests.attempt import Attempt
from worker_connector.requests.hints import HintReader

_log = logging.getLogger(__name__)


class PeerFetch:
    """Fetching from other workers, as the leader sees it: which hints are followed, and whom this worker serves."""

    def __init__(
        self,
        leader: Leader,
        reader: HintReader,
        config: FetchConfig,
        secret: bytes,
        *,
        weights: str = "",
        transport: BlockTransport | None = None,
        manual: bool = False,
    ) -> None:
        self._leader = leader
        self._reader = reader
        reader.on_fetch = self.asked
        self._config = config
        self._secret = secret
        self._weights = weights
        self._opening = threading.Lock()
        self._decided = threading.Event()
        """It listens, or never will."""
        self._server: FetchServer | None = None
        self.export = SlabExport(leader.lock, self._held)
        tier = FetchTier(leader.lock, self._held, self._entered, self._kept, self._withdrawn)
        self._transport = transport or TcpTransport(secret)
        self.fetcher = Fetcher(tier, self._transport, Peers(config.allowed_networks), config, manual=manual)

    # serving

    def open(self, dp_rank: int) -> None:
        """Listens, once. An engine runs on without: an address that cannot be had is logged, and none is published."""
        with self._opening:
            if self._decided.is_set():
                return
            config = self._config
            port = config.port + dp_rank if config.port else 0
            try:
                self._server = FetchServer(
                    config.host,
                    port,
                    self._secret,
                    self.export,
                    max_connections=config.max_connections,
                    deadline_seconds=config.deadline_ms / 1e3,
                )
            except (OSError, OverflowError) as error:
                self._decided.set()
                _log.error("semkv connector: no blocks are served on %s port %d: %s", config.host, port, error)
                return
            self._decided.set()
        self.fetcher.start()
        _log.info("semkv connector: blocks of rank %d are served at %s", dp_rank, self.endpoint)

    @property
    def endpoint(self) -> str | None:
        """For Dynamo's `router_hint_source_control_endpoints` (fetch/router_hint.py); None until `open`, and where it
        failed."""
        server = self._server
        return None if server is None else endpoint(self._config.advertised, server.port)

    def wait_open(self, timeout: float) -> str | None:
        """The endpoint, once it is known whether there is one."""
        self._decided.wait(timeout)
        return self.endpoint

    # pulling

    @property
    def reader(self) -> HintReader:
        """Counts what was in hints."""
        return self._reader

    @property
    def wait_seconds(self) -> float:
        """`connector.fetch.wait_ms`."""
        return self._config.wait_ms / 1e3

    def fetch(
        self, tokens: Sequence[int], hint: FetchHint, *, salt: str | None = None, adapter: int | None = None
    ) -> Future[int] | None:
        """Begins to pull what the hint says of this prompt. Any thread; never waits, never raises. The future: how many
        blocks entered. None: nothing to pull."""
        try:
            packed = pack_tokens(tokens)
        except ContractError:
            return None
        with self._leader.lock:
            life, namespaces, _ = self._leader.cache()
            if life is None or namespaces is None:
                return None
            namespace, digest, problem = namespaces.of(RequestScope(salt, True, adapter, ()))
            size = life.pool.tokens_per_block
        if problem is not None:
            return None
        return self._begin(namespace, digest, packed, (len(tokens) - 1) // size, hint)

    def asked(self, attempt: Attempt) -> None:
        """The engine asks about a request that carries a hint. On its scheduler's thread, under the leader's lock."""
        if attempt.question.problem is None and attempt.hints is not None and attempt.hints.fetch is not None:
            limit = attempt.question.limit_blocks
            self._begin(attempt.namespace, attempt.digest, attempt.tokens, limit, attempt.hints.fetch)

    def _begin(
        self, namespace: CacheNamespace, digest: bytes, tokens: bytes, limit: int, hint: FetchHint
    ) -> Future[int] | None:
        limit = min(limit, len(hint.block_hashes))
        if limit < 1:
            return None
        return self.fetcher.begin(Order(namespace, digest, tokens, limit, hint.source_control_endpoint))

    # the leader's cache, under its lock

    def _held(self) -> Held | None:
        life, _, slab = self._leader.cache()
        if life is None or life.ledger is None or slab is None or slab.incarnation != life.pool.incarnation:
            return None  # the rank has a new pool, and its leader does not know yet
        if not self._leader.comparable:
            return None
        return Held(life.pool, life.ledger, slab, life.content, self._weights)

    def _entered(self, entries: Sequence[BlockEntry]) -> None:
        life, _, _ = self._leader.cache()
        if life is not None:
            life.running.staged(entries)

    def _kept(self, namespace: CacheNamespace, entries: Sequence[BlockEntry]) -> None:
        life, _, _ = self._leader.cache()
        if life is not None:
            life.running.kept(namespace, entries)

    def _withdrawn(self) -> None:
        life, _, _ = self._leader.cache()
        if life is not None:
            life.running.flush()

    def snapshot(self) -> dict[str, Any]:
        """Numbers, JSON-able."""
        fetcher, server = self.fetcher, self._server
        return {
            "pulls": dict(fetcher.counts),
            "pulled_blocks": fetcher.blocks,
            "pulled_bytes": fetcher.bytes,
            "seconds": fetcher.seconds.snapshot(),
            "serving": dict(server.counts) if server is not None else {},
            "damaged": self.export.counts["damaged"],
            "listening": server is not None,
        }

    def close(self, timeout: float = 5.0) -> None:
        """Ends what is in hand, the threads and the server; waits for each of them `timeout` seconds at most."""
        self._transport.close()
        self.fetcher.close(timeout)
        with self._opening:
            self._decided.set()  # not opened any more
        if self._server is not None:
            self._server.close(timeout)
