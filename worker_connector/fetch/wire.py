"""What two workers say to each other when one pulls blocks from the other over TCP: length-prefixed frames, msgpack or
plain KV bytes.

Greeting: `Hello(nonce)` -> `Challenge(nonce)` -> `Proof` -> `Welcome(proof)`. Each side proves that it knows the shared
secret by an HMAC over both nonces, the pulling side first, so that a stranger hears nothing that depends on the secret.
Every later frame carries a MAC under a key of this connection and direction, with the number of the frame in it:
nothing can be changed, repeated, left out or put in by somebody on the way. Nothing is encrypted (docs/security.md).
Nothing is unpickled; a frame is one of the types below, or exactly as long as a block, and refused otherwise, before
memory is taken for it.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from typing import TypeVar

import msgspec

from dynamo_semkv.contracts.keys import KEY_BYTES
from worker_connector.fetch.transport import FetchFailed, Why

PROTOCOL = 1
NONCE_BYTES = 32
MAC_BYTES = 16
MAX_GREETING = 256
MAX_MESSAGE = 64 * 1024
MAX_KEYS = 256
"""Blocks in one request."""
MAX_BLOCK_BYTES = 1024 * 1024 * 1024
MAX_BLOCK_TOKENS = 8_192
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the side that pulls."""

    protocol: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server's answer to `Hello`: what the client is to prove that it knows the secret for."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The client's answer to the challenge."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server's own proof; requests may follow."""

    proof: bytes


class Get(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered by a `Block` and a frame of KV for each block that is there, up to the first that is not, then `Done`;
    or by `Refused`."""

    namespace: bytes
    layout: str
    shard: str
    tokens_per_block: int
    bytes_per_block: int
    keys: tuple[bytes, ...]
    weights: str


class Block(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One block, whose KV comes in the next frame; `tokens` are packed u32, `seal` is the checksum of its bytes."""

    key: bytes
    tokens: bytes
    seal: int


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """No more blocks come; `life` names the cache that they were in."""

    life: str


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The request is not answered, and why."""

    why: Why
    detail: str


Greeting = Hello | Challenge | Proof | Welcome
Message = Get | Block | Done | Refused
GREETING = msgspec.msgpack.Decoder(Greeting)
REQUEST = msgspec.msgpack.Decoder(Get)
ANSWER = msgspec.msgpack.Decoder(Block | Done | Refused)
_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")
G = TypeVar("G", bound=Greeting)


def malformed(detail: str) -> FetchFailed:
    """The error for what breaks the protocol."""
    return FetchFailed(Why.MALFORMED, detail)


def decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes | bytearray) -> T:
    """FetchFailed for whatever is no message."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise malformed(str(error)) from error


def check_get(get: Get) -> None:
    """FetchFailed for a request that no honest peer sends."""
    if not 1 <= len(get.keys) <= MAX_KEYS or any(len(key) != KEY_BYTES for key in get.keys):
        raise malformed(f"{len(get.keys)} keys, allowed are 1 to {MAX_KEYS} of {KEY_BYTES} bytes")
    if not 1 <= get.bytes_per_block <= MAX_BLOCK_BYTES or not 1 <= get.tokens_per_block <= MAX_BLOCK_TOKENS:
        raise malformed(f"a block of {get.bytes_per_block} bytes and {get.tokens_per_block} tokens")


# the greeting


def send_greeting(connection: socket.socket, message: Greeting, deadline: float) -> None:
    """Sends a message before there are keys; FetchFailed at the deadline."""
    payload = _ENCODER.encode(message)
    _sendall(connection, _LENGTH.pack(len(payload)) + payload, deadline)


def receive_greeting(connection: socket.socket, kind: type[G], deadline: float) -> G:
    """Reads one message before there are keys; FetchFailed for another kind, one that is too large, and at the
    deadline."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if size > MAX_GREETING:
        raise malformed(f"a greeting of {size} bytes, at most {MAX_GREETING} are allowed")
    found = decode(GREETING, _exactly(connection, size, deadline))
    if not isinstance(found, kind):
        raise malformed(f"{type(found).__name__} where {kind.__name__} was due")
    return found


def proof(secret: bytes, role: bytes, hers: bytes, mine: bytes) -> bytes:
    """HMAC-SHA256 over role and both nonces, that of the pulling side first."""
    return hmac.new(secret, b"semkv-fetch/1 " + role + b"\0" + hers + mine, hashlib.sha256).digest()


class Channel:
    """A connection after the greeting. For one thread. Raises FetchFailed, and is of no use afterwards."""

    def __init__(
        self, connection: socket.socket, secret: bytes, puller: bytes, server: bytes, *, serving: bool
    ) -> None:
        """`puller`, `server`: the nonces of both sides. `serving`: this is the serving side."""
        self._connection = connection
        self._out_key = proof(secret, b"key from server" if serving else b"key from puller", puller, server)
        self._in_key = proof(secret, b"key from puller" if serving else b"key from server", puller, server)
        self._sent = self._received = 0

    def send(self, message: Message, deadline: float) -> None:
        """Sends a message with its MAC; FetchFailed at the deadline."""
        self.send_bytes(_ENCODER.encode(message), deadline)

    def send_bytes(self, payload: bytes | memoryview, deadline: float) -> None:
        """KV goes out from where it is: the MAC follows it."""
        mac = _mac(self._out_key, self._sent, payload)
        self._sent += 1
        header = _LENGTH.pack(len(payload))
        if len(payload) <= MAX_MESSAGE:
            _sendall(self._connection, header + bytes(payload) + mac, deadline)
            return
        for part in (header, payload, mac):
            _sendall(self._connection, part, deadline)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], deadline: float) -> T:
        """Reads a message and checks its MAC; FetchFailed where it is wrong, too large or late."""
        size = self._size(deadline)
        if size > MAX_MESSAGE:
            raise malformed(f"a message of {size} bytes, at most {MAX_MESSAGE} are allowed")
        payload = _exactly(self._connection, size, deadline)
        self._check(payload, deadline)
        return decode(decoder, payload)

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """A frame of exactly this size."""
        size = self._size(deadline)
        if size != len(view):
            raise malformed(f"a block of {size} bytes, expected {len(view)}")
        _fill(self._connection, view, deadline)
        self._check(view, deadline)

    def _size(self, deadline: float) -> int:
        size: int = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size, deadline))[0]
        return size

    def _check(self, payload: bytes | bytearray | memoryview, deadline: float) -> None:
        mac = _exactly(self._connection, MAC_BYTES, deadline)
        if not hmac.compare_digest(bytes(mac), _mac(self._in_key, self._received, payload)):
            raise malformed("a frame was changed on the way")
        self._received += 1


def _mac(key: bytes, number: int, payload: bytes | bytearray | memoryview) -> bytes:
    """HMAC-SHA256, cut: processors have instructions for it, which makes it twice as fast as BLAKE2 on those that serve
    models."""
    mac = hmac.new(key, _NUMBER.pack(number), hashlib.sha256)
    mac.update(payload)
    return mac.digest()[:MAC_BYTES]


# bytes


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise FetchFailed(Why.TIMEOUT)
    return left


def _sendall(connection: socket.socket, payload: bytes | memoryview, deadline: float) -> None:
    connection.settimeout(_left(deadline))
    try:
        connection.sendall(payload)
    except TimeoutError as error:
        raise FetchFailed(Why.TIMEOUT) from error
    except OSError as error:
        raise FetchFailed(Why.LOST, str(error)) from error


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytearray:
    payload = bytearray(size)
    _fill(connection, memoryview(payload), deadline)
    return payload


def _fill(connection: socket.socket, view: memoryview, deadline: float) -> None:
    at = 0
    while at < len(view):
        connection.settimeout(_left(deadline))
        try:
            got = connection.recv_into(view[at:])
        except TimeoutError as error:
            raise FetchFailed(Why.TIMEOUT) from error
        except OSError as error:
            raise FetchFailed(Why.LOST, str(error)) from error
        if not got:
            raise FetchFailed(Why.LOST, "the other side closed the connection")
        at += got
