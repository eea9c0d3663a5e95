"""RankChannel: how the rank of a leader's own process sends the leader its results. Orders go the other way with the
metadata that the engine carries.

TensorRT-LLM constructs scheduler and worker concurrently, hands both nothing but `llm_args`, and returns only request
ids from the worker (`get_finished`). But the leader must know the pool's layout before it can offer, and which copies
have landed before it may call anything confirmed. On the leader's rank both objects live in one process (also under
attention data parallelism, where every rank has both), so a channel within the process is enough: the first of the two
makes it, under the identity of the `llm_args` object that both were given. If several ranks of one process were given
the same object, a worker may get another rank's channel; the first metadata names the channel of its leader, and the
worker moves to that one.

The leader handles a message in the thread that sends it. Under tensor parallelism the other ranks are processes of
their own: they send the same messages over a socket (link/remote_channel.py, link/rank_endpoint.py), and the leader
reduces the messages of all ranks to one (link/rank_aggregator.py). Channel ids are random, so that the id of a channel
in another process is never found in this one."""

from __future__ import annotations

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

_MAX_WAITING = 1024
"""Results that are kept until a leader listens."""


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
    """Blocks for which the rank's slab has room; 0 without a slab."""
    incarnation: str = ""
    """A random name of the slab's content. A new one means that the slab is empty, or that results of this rank were
    lost: the leader may not offer what was saved before."""
    block_size_configured: bool = False
    """`tokens_per_block` comes from the engine's settings and not from the pool (engine_api/geometry.py)."""


class LoadDone(msgspec.Struct, frozen=True, tag=True):
    """The copies of one load have landed (`ok`) or failed; `seconds` is how long they took, None where not measured."""

    rank: int
    iteration: int
    key: PlanKey
    ok: bool
    seconds: float | None = None
    reason: Reason | None = None
    """Why the load failed; None where the copy itself did."""


class LoadGivenUp(msgspec.Struct, frozen=True, tag=True):
    """The engine will not use what is being copied for this load; a `LoadDone` follows when the copies have landed."""

    rank: int
    iteration: int
    key: PlanKey
    reason: Reason


class ForwardDone(msgspec.Struct, frozen=True, tag=True):
    """The engine called `wait_for_save` of this iteration: the forward pass was enqueued behind the loads."""

    rank: int
    iteration: int


class SaveDone(msgspec.Struct, frozen=True, tag=True):
    """All blocks of one save order are in the slab and have checksums (`ok`), or none of them may be offered."""

    rank: int
    save_id: int
    ok: bool


class SlotsDamaged(msgspec.Struct, frozen=True, tag=True):
    """The scrubber found slots whose bytes do not match their checksums."""

    rank: int
    slots: tuple[int, ...]
    loaded: bool = False
    """The damage was found right after a load: the engine's pages have got damaged bytes."""


RankResult = RankReady | LoadDone | LoadGivenUp | ForwardDone | SaveDone | SlotsDamaged | DiskResult


class LocalRank(Protocol):
    """What the leader may ask of the rank in its own process. Only `make_resets_durable` waits."""

    @property
    def slab(self) -> HostSlab | None:
        """The slab of the pool that is registered now, perhaps before the leader has got its `RankReady`; None without
        one."""

    def verify(self, slots: Sequence[int]) -> list[int]:
        """Checks these slots within a bounded time (see memory/slab.py) and returns those that may not be offered."""

    def verify_soon(self, slots: Sequence[int]) -> None:
        """Puts these slots at the head of the scrubber's round."""

    def disk(self, order: DiskOrder) -> None:
        """Hands an order to the rank's disk store, which answers with a `DiskResult`. Must not wait."""

    def make_resets_durable(self) -> None:
        """Waits for the disk: on return, what the rank was ordered to clear is not served after a restart either.
        Raises OSError."""

    def snapshot(self) -> Mapping[str, Any]:
        """The rank's counters and gauges, JSON-able."""


@dataclass(eq=False)
class RankChannel:
    """The channel of one leader and the rank in its process. It keeps the last 1,024 results, in order, until the
    leader listens. Thread-safe."""

    channel_id: int
    rank: LocalRank | None = None
    last_idle_forward: int = 0
    """The last iteration without orders whose forward pass was enqueued. The leader reads it with the next batch: no
    attempt waits for it, and a message would cost as much as the rest of such an iteration."""
    _handler: Callable[[RankResult], None] | None = None
    _waiting: deque[RankResult] = field(default_factory=lambda: deque(maxlen=_MAX_WAITING))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, handler: Callable[[RankResult], None]) -> None:
        """Gives `handler` the results that wait, and each later one in its sender's thread. `handler` must not
        raise."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._handler = handler
                    return
                result = self._waiting.popleft()
            handler(result)  # what is posted meanwhile waits its turn

    def post(self, result: RankResult) -> None:
        """Runs the leader's handler in the caller's thread, or keeps the result until the leader listens."""
        with self._lock:
            handler = self._handler
            if handler is None:
                self._waiting.append(result)
                return
        handler(result)

    def attach(self, rank: LocalRank) -> None:
        """The rank's end: the leader may ask this rank from now on."""
        self.rank = rank

    def detach(self, rank: LocalRank) -> None:
        """The rank has moved to another leader. Another rank that has come meanwhile stays."""
        if self.rank is rank:
            self.rank = None

    def make_resets_durable(self) -> None:
        """Waits for the rank's disk (`LocalRank.make_resets_durable`): not for an engine's callback. Raises
        OSError."""
        if self.rank is not None:
            self.rank.make_resets_durable()


_lock = threading.Lock()
_channels: weakref.WeakValueDictionary[int, RankChannel] = weakref.WeakValueDictionary()
_half_open: dict[int, tuple[str, weakref.ref[RankChannel]]] = {}
"""By the identity of `llm_args`: the side that has made a channel, which the other side has not joined yet."""


def leader_channel(llm_args: Any) -> RankChannel:
    """The channel of the rank that was given the same `llm_args` object, or a new one for it to find."""
    return _join(llm_args, "leader")


def rank_channel(llm_args: Any) -> RankChannel:
    """The channel of the leader that was given the same `llm_args` object, or a new one for it to find."""
    return _join(llm_args, "rank")


def channel_by_id(channel_id: int) -> RankChannel | None:
    """The channel of this process with that id; None in another process than the leader's."""
    with _lock:
        return _channels.get(channel_id)


def _join(llm_args: Any, side: str) -> RankChannel:
    with _lock:
        other, reference = _half_open.pop(id(llm_args), (side, None))
        channel = reference() if reference is not None and other != side else None
        if channel is None:
            channel = RankChannel(secrets.randbits(62) + 1)
            _channels[channel.channel_id] = channel
            _half_open[id(llm_args)] = (side, weakref.ref(channel))
        return channel
