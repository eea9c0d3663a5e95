"""What reaches an engine process from beside it: local sockets, the engine's cache events, files of a disk tier, the
model's directory."""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.keys import child_key, root_key
from dynamo_semkv.contracts.namespace import CacheNamespace
from tests.fuzz import odd
from worker_connector.disk.block_file import BlockFormat, BlockRecord
from worker_connector.disk.namespace_codec import namespace_of, words_of
from worker_connector.disk.store_epoch import read_epoch
from worker_connector.donors.kv_event_socket import MAX_FRAME, KvEventListener
from worker_connector.donors.kv_events import KvFreshness
from worker_connector.engine_api.request_view import pack_tokens, unpack_tokens
from worker_connector.fetch import peers as fetch_peers
from worker_connector.fetch import wire as fetch_wire
from worker_connector.fetch.transport import FetchFailed, Why
from worker_connector.fetch.wire import Block, Challenge, Done, Get, Proof, Refused, Welcome
from worker_connector.fetch.wire import Hello as Hello_
from worker_connector.link import wire as rank_wire
from worker_connector.link.channel import SlotsDamaged
from worker_connector.link.wire import Acknowledged, Hello, Numbered, WireError
from worker_connector.requests.engine_namespace import _heads

in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
FRAMES = (
    rank_wire.frame(Hello(rank_wire.PROTOCOL, "token", 0, "session")),
    rank_wire.frame(Numbered(1, SlotsDamaged(0, (3, 4), True))),
    rank_wire.frame(Acknowledged(3)),
)


def over_a_socket(raw: bytes, read: Any) -> Any:
    """What a reader makes of these bytes and of their end."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(10)
        writer = threading.Thread(target=lambda: (far.sendall(raw), far.shutdown(socket.SHUT_WR)))
        writer.start()
        try:
            return read(near)
        finally:
            near.close()  # a writer that is not read to its end is let go
            writer.join(10)


@settings(max_examples=50)
@given(raw=st.binary(max_size=60) | st.sampled_from(FRAMES).flatmap(odd.damaged), leader=st.booleans())
@example(raw=struct.pack(">I", 2**32 - 1) + b"x" * 50, leader=True)
@example(raw=struct.pack(">I", 5) + b"\xdd\xff\xff\xff\xff", leader=False)
def test_any_bytes_between_ranks(raw: bytes, leader: bool) -> None:
    read = rank_wire.read_from_leader if leader else rank_wire.read_from_rank
    try:
        assert isinstance(over_a_socket(raw, read), (Hello, Numbered, Acknowledged))
    except (WireError, EOFError):
        pass  # the documented two


@pytest.mark.parametrize(
    "lie", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5_000]
)
def test_a_frame_that_lies_about_its_lengths_costs_no_memory(lie: bytes) -> None:
    tracemalloc.start()
    try:
        for decode in (rank_wire._FROM_RANK, rank_wire._FROM_LEADER):
            with pytest.raises(WireError):
                rank_wire._decode(decode, lie)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


GREETINGS = tuple(
    msgspec.msgpack.encode(message)
    for message in (Hello_(1, b"n" * 32), Challenge(b"n" * 32), Proof(b"p" * 32), Welcome(b"p" * 32))
)
MESSAGES = tuple(
    msgspec.msgpack.encode(message)
    for message in (
        Get(b"n" * 32, "layout", "0/1", 4, 64, (b"k" * 16,), "weights"),
        Block(b"k" * 16, b"t" * 16, 2**64 - 1),
        Done("life"),
        Refused(Why.BUSY, "16 connections"),
    )
)


@settings(max_examples=60)
@given(
    body=st.binary(max_size=60) | st.sampled_from(GREETINGS).flatmap(odd.damaged),
    size=st.none() | st.integers(0, 2**32 - 1),
)
@example(body=b"\xdd\xff\xff\xff\xff", size=None)
@example(body=b"x", size=2**32 - 1)
def test_any_bytes_between_workers(body: bytes, size: int | None) -> None:
    """From a stranger, in front of the proofs; and from one who has the secret, behind them."""
    refused: set[Why] = set()
    raw = struct.pack(">I", len(body) if size is None else size) + body
    for kind in (Hello_, Challenge, Proof, Welcome):
        try:
            found = over_a_socket(
                raw, lambda near, kind=kind: fetch_wire.receive_greeting(near, kind, time.monotonic() + 10)
            )
            assert isinstance(found, kind)
        except FetchFailed as failed:
            refused.add(failed.why)
    for decoder in (fetch_wire.REQUEST, fetch_wire.ANSWER):
        try:
            said = fetch_wire.decode(decoder, body)
            assert isinstance(said, (Get, Block, Done, Refused))
        except FetchFailed as failed:
            refused.add(failed.why)
    assert refused <= {Why.MALFORMED, Why.LOST}


@settings(max_examples=60)
@given(body=st.sampled_from(MESSAGES).flatmap(odd.damaged))
def test_any_message_of_a_worker_that_has_the_secret(body: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        sender = fetch_wire.Channel(far, b"secret", b"a", b"b", serving=True)
        reader = fetch_wire.Channel(near, b"secret", b"a", b"b", serving=False)
        sender.send_bytes(body, time.monotonic() + 10)
        refused: Why | None = None
        try:
            assert isinstance(reader.receive(fetch_wire.ANSWER, time.monotonic() + 10), (Block, Done, Refused))
        except FetchFailed as failed:
            refused = failed.why
        assert refused in (None, Why.MALFORMED)


@given(
    st.text(max_size=60)
    | st.from_regex(r"(tcp|http)://\[?[0-9a-f:.]{1,20}\]?:[0-9]{1,6}", fullmatch=True)
    | st.ip_addresses().map(lambda host: fetch_peers.endpoint(str(host), 7011))
)
def test_any_address_of_a_hint(text: str) -> None:
    """Only a number within the allowed networks comes out, whatever goes in."""
    try:
        address = fetch_peers.Peers("10.0.0.0/8,fd00::/8").address(text)
    except fetch_peers.NotAllowed:
        return
    host = ipaddress.ip_address(address.host)
    host = getattr(host, "ipv4_mapped", None) or host
    assert host in ipaddress.ip_network("10.0.0.0/8" if host.version == 4 else "fd00::/8")
    assert 1 <= address.port <= 65_535


EVENT = {
    "event_id": 0, "window_size": 64, "attention_dp_rank": 0, "layer_group_id": 0,
    "data": {"type": "stored", "parent_hash": None, "blocks": [
        {"block_hash": 5, "tokens": [{"token_id": n, "token_extra_id": 0} for n in range(2)],
         "cache_level": 0, "priority": 1},
    ]},
}  # fmt: skip


@settings(max_examples=80)
@given(st.lists(odd.changed(EVENT), max_size=5))
def test_any_cache_events(events: list[Any]) -> None:
    it = KvFreshness(2, max_blocks=8)
    it.apply(events)
    assert it.standing(0).value in ("fresh", "quarantined")


@in_a_folder
@given(raw=st.binary(max_size=80) | odd.damaged(struct.pack(">I", 3) + msgspec.msgpack.encode([{}])))
@example(raw=struct.pack(">I", MAX_FRAME + 1))
def test_any_bytes_of_an_event_pipe(tmp_path: Path, raw: bytes) -> None:
    heard: list[Any] = []
    ear = KvEventListener(tmp_path / "s", heard.append)
    over_a_socket(raw, ear._read)
    assert all(isinstance(events, list) for events in heard)


NAMESPACE = CacheNamespace(model="m", tenant="t")
FORMAT = BlockFormat(b"g" * 16, 64)
TOKENS = pack_tokens(range(4))


def record() -> BlockRecord:
    digest = NAMESPACE.digest()
    parent = root_key(digest)
    return BlockRecord(digest, child_key(parent, TOKENS), parent, 0, TOKENS, words_of(NAMESPACE))


def whole(folder: Path) -> Path:
    block = record()
    path = folder / f"{FORMAT.name_of(block.namespace, block.key)}.kv"
    FORMAT.write(folder / "unfinished", path, block, memoryview(bytes(range(64))), fsync=False)
    return path


@in_a_folder
@given(data=st.data())
def test_any_block_file_is_the_block_or_a_miss(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is damaged, what is read is what was written, or nothing."""
    path = whole(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(data.draw(odd.damaged(raw) | st.binary(max_size=400)))
    target = bytearray(64)
    if FORMAT.read(path, record(), memoryview(target)):
        assert bytes(target) == bytes(range(64))
        assert path.read_bytes() == raw
    found = FORMAT.look(path, path.stat().st_size)
    if not isinstance(found, str):
        assert (found.namespace, found.key, found.tokens) == (record().namespace, record().key, TOKENS)


@given(st.binary(max_size=300) | odd.damaged(words_of(NAMESPACE)))
@example(b"[" * 100_000)
@example(b'{"model":' * 20_000)
def test_any_words_of_a_namespace(words: bytes) -> None:
    found = namespace_of(words, NAMESPACE.digest())
    assert found is None or found == NAMESPACE


@in_a_folder
@given(raw=st.binary(max_size=40))
def test_any_epoch(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "epoch").write_bytes(raw)
    assert read_epoch(tmp_path) == (raw if len(raw) == 16 else None)


@in_a_folder
@given(
    raw=st.binary(max_size=60) | odd.damaged(b'{"num_attention_heads": 8, "num_key_value_heads": 2, "text_config": {}}')
)
@example(raw=b"[" * 100_000)
def test_any_configuration_of_a_model(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    found = _heads(tmp_path)
    assert found is None or isinstance(found, str)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_tokens_there_and_back(tokens: list[int]) -> None:
    assert np.array_equal(unpack_tokens(pack_tokens(tokens)), np.array(tokens, np.uint32))
