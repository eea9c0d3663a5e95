"""LeaderLink: the rank's connection to its leader, in this process (link/channel.py) or in another one
(link/remote_channel.py)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.link.channel import LocalRank, RankChannel, RankReady, RankResult
from worker_connector.link.metadata import ConnectorMetadata
from worker_connector.link.remote_channel import RemoteChannel

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class LeaderLink:
    """One rank's link. It begins with the channel that pairing gave it, and follows the metadata."""

    def __init__(self, channel: RankChannel, rank: LocalRank, number: int, apart: bool, counts: Counter[str]) -> None:
        """`apart`: the leader is in another process (tensor parallelism), and metadata says where. `counts` gets
        `moved_channel`, `foreign_channel` and `called_leader`."""
        self._channel: RankChannel | RemoteChannel = channel
        self._rank = rank
        self._number = number
        self._apart = apart
        self._counts = counts
        self._ready: RankReady | None = None
        channel.attach(rank)

    @property
    def remote(self) -> RemoteChannel | None:
        """The channel to a leader in another process; None where the leader is in this one."""
        return self._channel if isinstance(self._channel, RemoteChannel) else None

    def post(self, result: RankResult) -> None:
        """Sends a result. Every leader that the rank moves to later gets the last `RankReady` too."""
        if isinstance(result, RankReady):
            self._ready = result
        self._channel.post(result)

    def idle_forward_done(self, iteration: int) -> None:
        """The forward pass of an iteration without orders was enqueued. A leader in another process need not know."""
        if isinstance(self._channel, RankChannel):
            self._channel.last_idle_forward = iteration

    def follow(self, metadata: ConnectorMetadata, find: Callable[[int], RankChannel | None]) -> None:
        """Moves to the leader that made this metadata, unless the rank is linked to it already. Never raises: where no
        thread can be started, the next metadata tries again. `find`: a channel of this process by its id, or None."""
        if metadata.channel_id == self._channel.channel_id:
            return
        channel = find(metadata.channel_id)
        if channel is not None:
            self._counts["moved_channel"] += 1
            self._move_to(channel)
        elif metadata.endpoint is not None and self._apart:
            try:
                self._move_to(RemoteChannel(metadata.channel_id, metadata.endpoint, self._number))
                self._counts["called_leader"] += 1
            except RuntimeError as error:
                _throttled.error("semkv connector: rank %d has no thread for its leader: %s", self._number, error)
        else:
            self._counts["foreign_channel"] += 1

    def _move_to(self, channel: RankChannel | RemoteChannel) -> None:
        self.close()
        if isinstance(self._channel, RankChannel):
            self._channel.detach(self._rank)
        self._channel = channel
        if isinstance(channel, RankChannel):
            channel.attach(self._rank)
        if self._ready is not None:
            channel.post(self._ready)

    def close(self) -> None:
        """Ends the connection to a leader in another process. Idempotent."""
        if self.remote is not None:
            self.remote.close()
