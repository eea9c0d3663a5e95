"""RankChannel: how a leader and the worker of its own rank exchange messages, beside the metadata that the engine
carries.

TensorRT-LLM constructs scheduler and worker concurrently, hands both nothing but `llm_args`, and returns only request
ids from the worker (`get_finished`). But the leader must know the pool's layout before it can offer, and which copies
have landed before it may call anything confirmed. On the leader's rank both objects live in one process (also under
attention data parallelism, where every rank has both), so a process-local channel serves: the first of the two makes
it, under the identity of the `llm_args` object that both were given. If one object is given to several ranks of one
process that is ambiguous, and the first metadata settles it: it names the channel of its leader, and the worker moves
there.

Messages go one way, rank -> leader, and are handled in the caller's thread. Under tensor parallelism the other ranks
are processes of their own: they send the same messages over a socket (link/remote_channel.py, link/rank_endpoint.py),
and the leader reduces the messages of all ranks to one (link/rank_aggregator.py). Channel ids are random, so that a
channel of another process is never taken for one of this."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dynamo_semkv.contracts.report import Reason
from worker_connector.disk.messages import DiskOrder, DiskResult
from worker_connector.ledger.plan import PlanKey
from worker_connector.memory.slab import HostSlab

_log = logging.getLogger(__name__)
_WAITING = 1024


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank's pools are registered."""

    rank: int
    tokens_per_block: int
    group_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    bytes_per_block: int
    kv_dtype: str
    kv_layout: str
    slots: int
    """Blocks that the rank's slab holds; 0 without a slab."""
    incarnation: str = ""
    """Names the content of the slab. A new value means that the slab is empty, or that results of this rank were lost:
    what was saved before may not be offered."""
    block_size_configured: bool = False
    """`tokens_per_block` comes from the engine's settings and not from the pool (engine_api/geometry.py)."""


class LoadDone(msgspec.Struct, frozen=True, tag=True):
    """The copies of one plan have landed (`ok`), or have failed."""

    rank: int
    iteration: int
    key: PlanKey
    ok: bool
    seconds: float | None = None
    reason: Reason | None = None
    """Why the load failed, where it is not simply that the copy did."""


class LoadGivenUp(msgspec.Struct, frozen=True, tag=True):
    """The engine will not use what is being copied for this plan; its `LoadDone` follows when the copies have
    landed."""

    rank: int
    iteration: int
    key: PlanKey
    reason: Reason


class ForwardDone(msgspec.Struct, frozen=True, tag=True):
    """`wait_for_save` of this iteration was called: its forward pass was enqueued behind its loads."""

    rank: int
    iteration: int


class SaveDone(msgspec.Struct, frozen=True, tag=True):
    """The blocks of one save order have landed and have their checksums (`ok`), or their slots hold nothing."""

    rank: int
    save_id: int
    ok: bool


class SlotsDamaged(msgspec.Struct, frozen=True, tag=True):
    """The scrubber found slots whose bytes do not match their checksums."""

    rank: int
    slots: tuple[int, ...]
    loaded: bool = False
    """They were found right after a load: pages have damaged bytes."""


RankResult = RankReady | LoadDone | LoadGivenUp | ForwardDone | SaveDone | SlotsDamaged | DiskResult


class LocalRank(Protocol):
    """What the leader may ask of the rank in its own process, without waiting."""

    @property
    def slab(self) -> HostSlab | None:
        """The slab of the pool that is registered now, which the leader may learn of later; None without one."""

    def verify(self, slots: Sequence[int]) -> list[int]:
        """Slots that may not be offered, checked within a bounded time (see memory/slab.py)."""

    def verify_soon(self, slots: Sequence[int]) -> None:
        """Puts these slots at the head of the scrubber's round."""

    def disk(self, order: DiskOrder) -> None:
        """Hands an order to the rank's disk store, which answers with a `DiskResult`. Must not wait."""

    def make_resets_durable(self) -> None:
        """Waits for the disk, unlike the other methods: on return, what the rank was ordered to clear is not served
        after a restart either. Raises OSError."""

    def snapshot(self) -> Mapping[str, Any]:
        """Numbers, JSON-able."""


@dataclass(eq=False)
class RankChannel:
    """The channel of one leader and the rank in its process. Results that come before the leader listens are kept, in
    order, the last 1,024 of them."""

    channel_id: int
    rank: LocalRank | None = None
    forwarded: int = 0
    """The last iteration without orders whose forward pass was enqueued: a number that the leader reads with the next
    batch, since no attempt waits for it and a message would cost as much as the rest of such an iteration."""
    _handler: Callable[[RankResult], None] | None = None
    _waiting: deque[RankResult] = field(default_factory=lambda: deque(maxlen=_WAITING))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, handler: Callable[[RankResult], None]) -> None:
        """The leader's end. `handler` must not raise."""
        with self._lock:
            self._handler = handler
            waiting, self._waiting = list(self._waiting), deque(maxlen=_WAITING)
        for result in waiting:
            handler(result)

    def post(self, result: RankResult) -> None:
        """Runs the leader's handler in the caller's thread; before the leader listens, keeps the result."""
        with self._lock:
            handler = self._handler
            if handler is None:
                self._waiting.append(result)
                return
        handler(result)

    def make_resets_durable(self) -> None:
        """As the rank's own (`LocalRank`). Not for an engine's callback: it waits for the disk. Raises OSError."""
        if self.rank is not None:
            self.rank.make_resets_durable()

    @property
    def has_leader(self) -> bool:
        """True once the leader listens."""
        return self._handler is not None


class _Pairing:
    """All channels of this process, and which of them belongs to which `llm_args` object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: weakref.WeakValueDictionary[int, RankChannel] = weakref.WeakValueDictionary()
        self._halves: dict[int, tuple[str, weakref.ref[RankChannel]]] = {}

    def join(self, llm_args: Any, side: str) -> RankChannel:
        """The channel whose other half was opened with the same object, or a new one."""
        with self._lock:
            found = self._halves.pop(id(llm_args), None)
            if found is not None:
                other, reference = found
                channel = reference()
                if channel is not None and other != side:
                    return channel
            channel = RankChannel(secrets.randbits(62) + 1)
            self._channels[channel.channel_id] = channel
            self._halves[id(llm_args)] = (side, weakref.ref(channel))
            return channel

    def find(self, channel_id: int) -> RankChannel | None:
        with self._lock:
            return self._channels.get(channel_id)


_PAIRING = _Pairing()


def leader_channel(llm_args: Any) -> RankChannel:
    """The channel of the rank that was given the same `llm_args` object, or a new one for it to find."""
    return _PAIRING.join(llm_args, "leader")


def rank_channel(llm_args: Any) -> RankChannel:
    """The channel of the leader that was given the same `llm_args` object, or a new one for it to find."""
    return _PAIRING.join(llm_args, "rank")


def channel_by_id(channel_id: int) -> RankChannel | None:
    """The channel of this process with that id; None in another process than the leader's."""
    return _PAIRING.find(channel_id)
