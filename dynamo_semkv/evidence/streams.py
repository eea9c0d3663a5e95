"""Streams: the event streams of all emitters, with room that no worker can take from the others.

A worker whose model card is known has the ranks of the card and no other. For all other workers, streams and held
events are bounded in sum, and the worker with most of them gives up first: an emitter that invents ranks pushes out its
own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from dynamo_semkv.contracts.donor_events import DonorEvent
from dynamo_semkv.evidence.donor import StreamKey
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.evidence.shares import Shares
from dynamo_semkv.evidence.stream import Stream, Verdict


class Streams:
    """`is_empty(key)`: whether a stream has no donors, so that nothing is lost with it. `on_end(key)`: ends the donors
    that a stream has so far."""

    def __init__(
        self,
        limits: CatalogLimits,
        *,
        is_empty: Callable[[StreamKey], bool],
        on_end: Callable[[StreamKey], object],
    ) -> None:
        self._limits = limits
        self._is_empty = is_empty
        self._on_end = on_end
        self._of: OrderedDict[StreamKey, Stream] = OrderedDict()
        self._room: Shares[int, int] = Shares()
        self.held = 0
        """Events of all streams that wait for an earlier one."""
        self._held: dict[int, int] = {}
        """The same, by worker."""
        self._ranks: dict[int, frozenset[int]] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._of.values())

    def get(self, key: StreamKey) -> Stream | None:
        """The emitter's stream; None if it has none."""
        return self._of.get(key)

    def admit(self, event: DonorEvent) -> tuple[Verdict, list[DonorEvent], Stream | None]:
        """`Stream.admit` of the emitter's own stream, which is made if there is room; None if there is none for it."""
        key = StreamKey(event.worker_id, event.dp_rank)
        ranks = self._ranks.get(key.worker_id)
        if ranks is not None and key.dp_rank not in ranks:
            return Verdict.UNLISTED_RANK, [], None
        stream = self._of.get(key) or self._new(key)
        if stream is None:
            return Verdict.TOO_MANY_STREAMS, [], None
        self._of.move_to_end(key)
        self._room.use(*key)
        epoch, held = stream.epoch, stream.held
        verdict, ready = stream.admit(event, may_hold=self.held < self._limits.max_held or self._may_hold(key))
        if stream.held != held:
            self._count_held(key.worker_id, stream.held - held)
        if stream.epoch is not epoch and epoch is not None:
            self._on_end(key)
        return verdict, ready, stream

    def set_ranks(self, worker_id: int, ranks: frozenset[int]) -> None:
        """The ranks that a live worker has by its model card; streams of other ranks end. Empty: the worker is not
        listed, and its ranks are unknown."""
        if not ranks:
            self._ranks.pop(worker_id, None)
            return
        self._ranks[worker_id] = ranks
        for rank in self._room.of(worker_id):
            if rank not in ranks:
                self.drop(StreamKey(worker_id, rank))

    def mark_lost(self, stream: Stream) -> None:
        """The stream lost events: it drops what it holds and gives no credit until a reset."""
        held = stream.held
        stream.mark_lost()
        self._count_held(stream.key.worker_id, -held)

    def forget(self, streams: Iterable[Stream]) -> None:
        """Ends streams of workers that are gone for good: their late events are refused. A stream that was forgotten
        before is dropped."""
        for stream in streams:
            if stream.epoch is None:
                self.drop(stream.key)
                continue
            self._count_held(stream.key.worker_id, -stream.held)
            stream.forget()
            self._on_end(stream.key)

    def drop(self, key: StreamKey) -> None:
        """Forgets the stream and ends its donors. Raises KeyError for an unknown one."""
        stream = self._of.pop(key)
        self._room.drop(*key)
        self._count_held(key.worker_id, -stream.held)
        if stream.epoch is not None:
            stream.epoch.end()
            self._on_end(key)

    def _new(self, key: StreamKey) -> Stream | None:
        if len(self._of) >= self._limits.max_streams and not self._make_room(key.worker_id):
            return None
        self._of[key] = Stream(key, self._limits.max_held_per_stream)
        return self._of[key]

    def _make_room(self, worker_id: int) -> bool:
        """Drops a stream of the worker with most, if it is the newcomer or keeps at least as many as the newcomer gets;
        else the one that was silent longest, if it has no donors. False: neither may go."""
        victim = self._room.victim()
        if victim is not None and (
            victim[0] == worker_id or self._room.sizes.most > self._room.sizes.of(worker_id) + 1
        ):
            self.drop(StreamKey(*victim))
            return True
        silent = next(iter(self._of))
        if not self._is_empty(silent):
            return False
        self.drop(silent)
        return True

    def _may_hold(self, key: StreamKey) -> bool:
        """Makes room for a held event where there is none: another worker that holds more gives up one stream's."""
        greedy = max(self._held, key=self._held.__getitem__)
        if self._held[greedy] <= self._held.get(key.worker_id, 0) + 1:
            return False
        streams = (self._of[StreamKey(greedy, rank)] for rank in self._room.of(greedy))
        self.mark_lost(max(streams, key=lambda stream: stream.held))
        return True

    def _count_held(self, worker_id: int, by: int) -> None:
        self.held += by
        after = self._held.get(worker_id, 0) + by
        if after:
            self._held[worker_id] = after
        else:
            self._held.pop(worker_id, None)
