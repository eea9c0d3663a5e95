"""A publisher of KV cache events as TensorRT-LLM's `ZmqEventPublisher` is one: three frames, msgpack maps, a replay
endpoint."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

STORED = "BlockStored"
REMOVED = "BlockRemoved"
CLEARED = {"type": "AllBlocksCleared"}


def stored(
    parent: int | None, hashes: Sequence[int], tokens: Sequence[int], size: int, **changes: Any
) -> dict[str, Any]:
    return {
        "type": STORED,
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | changes


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": REMOVED, "block_hashes": list(hashes), "medium": "GPU"}


def payload(*events: dict[str, Any], rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


class StreamPublisher:
    """`publish` sends from the caller's thread; replays are answered by a thread. `endpoint` and `replay` are bound on
    free ports."""

    def __init__(self, topic: str = "", endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._topic = topic.encode()
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.bind(endpoint)
        self._replays = zmq.Context.instance().socket(zmq.ROUTER)
        self._replays.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._replays.getsockopt_string(zmq.LAST_ENDPOINT)
        self.number = 0
        self.kept: list[tuple[int, bytes]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        assert self._socket.poll(30_000), "nobody subscribed"
        self._socket.recv()

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        self.send(payload(*events), lost=lost)

    def send(self, raw: bytes, *, lost: bool = False) -> None:
        self.kept.append((self.number, raw))
        if not lost:
            self._socket.send_multipart((self._topic, self.number.to_bytes(8, "big"), raw))
        self.number += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10)
        self._socket.close(0)
        self._replays.close(0)

    def _answer(self) -> None:
        while not self._closing.is_set():
            if not self._replays.poll(50):
                continue
            client, _, start = self._replays.recv_multipart()
            for number, raw in list(self.kept):
                if number >= int.from_bytes(start, "big"):
                    self._replays.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), raw))
            self._replays.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
