"""EventStream: hears the engine's own streaming KV event publisher, where the engine has one
(`kv_cache_config.kv_events_config`).

Each data-parallel rank of TensorRT-LLM binds a ZeroMQ `PUB` socket on its machine: the configured port plus its rank,
or for `ipc` and `inproc` the name plus `_dp<rank>`. The leader of that rank subscribes there on a thread of its own,
beside whoever else does. What was published before it came, or got lost on the way, is asked for at the replay
endpoint, where there is one; otherwise it is a loss.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker_connector.donors.event_batches import EventBatches

_log = logging.getLogger(__name__)

MAX_BATCH = 64 * 1024 * 1024
"""Bytes. A publisher of TensorRT-LLM caps what it says of one iteration at 50,000 blocks."""
MAX_BATCHES = 10_000
"""Waiting in ZeroMQ."""
REPLAY_SECONDS = 2.0
_POLL_MS = 200
_ANY_HOST = frozenset({"*", "0.0.0.0", "[::]", ""})
_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


@dataclass(frozen=True)
class StreamAddress:
    """Where one rank publishes; `replay` None: nothing can be asked for again."""

    endpoint: str
    replay: str | None
    topic: str


def stream_address(llm_args: Any, dp_rank: int) -> StreamAddress | None:
    """As the engine's arguments say. None where it does not publish; ValueError for an endpoint that is none."""
    config = getattr(getattr(llm_args, "kv_cache_config", None), "kv_events_config", None)
    if config is None:
        return None

    def option(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if not option("enable_kv_cache_events") or option("publisher") not in (None, "zmq"):
        return None
    replay = option("replay_endpoint")
    return StreamAddress(
        _endpoint_of(option("endpoint") or "tcp://*:5557", dp_rank),
        _endpoint_of(replay, dp_rank) if replay else None,
        option("topic") or "",
    )


def _endpoint_of(endpoint: str, dp_rank: int) -> str:
    if endpoint.startswith(("ipc://", "inproc://")):
        return f"{endpoint}_dp{dp_rank}" if dp_rank else endpoint
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not port.isdigit() or not 0 < int(port) <= 65_535 - dp_rank:
        raise ValueError(
            f"kv_events_config: {endpoint!r} for rank {dp_rank}; expected tcp://HOST:PORT, ipc:// or inproc://"
        )
    return f"tcp://{'127.0.0.1' if host in _ANY_HOST else host}:{int(port) + dp_rank}"


class EventStream:
    """`hear` gets lists of events in the serializer's shape, on this thread; it must not raise."""

    def __init__(self, address: StreamAddress, hear: Callable[[list[Any]], None]) -> None:
        """ImportError where there is no pyzmq."""
        import zmq

        self._zmq: Any = zmq
        self._address = address
        self._hear = hear
        self._batches = EventBatches()
        self._last: int | None = None
        """Number of the last batch that was subscribed to, not replayed."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semkv-kv-event-stream", daemon=True)
        self.counts: Counter[str] = Counter()
        """`batches`, `replayed`, `restarted`, `strange` (not of three frames); `failed`: the stream ended by a
        fault."""

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            with self._zmq.Context.instance().socket(self._zmq.SUB) as socket:
                socket.setsockopt(self._zmq.LINGER, 0)
                socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_BATCH)
                socket.setsockopt(self._zmq.RCVHWM, MAX_BATCHES)
                socket.setsockopt(self._zmq.SUBSCRIBE, self._address.topic.encode())
                socket.connect(self._address.endpoint)
                while not self._closing.is_set():
                    if socket.poll(_POLL_MS):
                        self._take(socket.recv_multipart())
        except self._zmq.ZMQError as error:
            self.counts["failed"] += 1
            _log.warning("semkv connector: KV cache events at %s are not heard: %s", self._address.endpoint, error)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self.counts["strange"] += 1
            return
        number = int.from_bytes(frames[1], "big")
        self.counts["batches"] += 1
        if self._last is not None and number <= self._last:
            self.counts["restarted"] += 1
            self._hear(self._batches.restarted())
        self._last = number
        if number > self._batches.expected and self._address.replay is not None:
            for missed, payload in self._replayed(self._address.replay):
                self.counts["replayed"] += 1
                self._hear(self._batches.read(missed, payload))
        self._hear(self._batches.read(number, frames[2]))

    def _replayed(self, endpoint: str) -> Iterator[tuple[int, bytes]]:
        """What the publisher still has from the expected batch on; it may have forgotten the first ones."""
        with self._zmq.Context.instance().socket(self._zmq.DEALER) as socket:
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_BATCH)
            socket.connect(endpoint)
            socket.send_multipart((b"", self._batches.expected.to_bytes(_NUMBER_BYTES, "big")))
            while not self._closing.is_set() and socket.poll(int(REPLAY_SECONDS * 1000)):
                frames = socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != _NUMBER_BYTES or frames[2] == _END_OF_REPLAY:
                    return
                yield int.from_bytes(frames[2], "big"), frames[3]
