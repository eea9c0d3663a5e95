"""LeaderLink: the rank's connection to its leader, in this process (link/channel.py) or in another one
(link/remote_channel.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from worker_connector.link.channel import LocalRank, RankChannel, RankReady, RankResult
from worker_connector.link.metadata import ConnectorMetadata
from worker_connector.link.remote_channel import RemoteChannel


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
        self.remote: RemoteChannel | None = None
        channel.rank = rank

    @property
    def has_leader(self) -> bool:
        """True once a leader listens, and always for one in another process."""
        return self._channel.has_leader

    def post(self, result: RankResult) -> None:
        """Sends a result. Every leader that the rank moves to later gets the last `RankReady` too."""
        if isinstance(result, RankReady):
            self._ready = result
        self._channel.post(result)

    def idle_forward_done(self, iteration: int) -> None:
        """The forward pass of an iteration without orders was enqueued. A leader in another process need not know."""
        channel = self._channel
        if type(channel) is RankChannel:
            channel.last_idle_forward = iteration

    def follow(self, metadata: ConnectorMetadata, find: Callable[[int], RankChannel | None]) -> None:
        """Moves to the leader that made this metadata, unless the rank is linked to it already. `find`: a channel of
        this process by its id, or None."""
        if metadata.channel_id == self._channel.channel_id:
            return
        channel = find(metadata.channel_id)
        if channel is not None:
            self._counts["moved_channel"] += 1
            self._move_to(channel)
        elif metadata.endpoint is not None and self._apart:
            self._counts["called_leader"] += 1
            self.close()
            self.remote = RemoteChannel(metadata.channel_id, metadata.endpoint, self._number)
            self._move_to(self.remote)
        else:
            self._counts["foreign_channel"] += 1

    def _move_to(self, channel: RankChannel | RemoteChannel) -> None:
        if self._channel.rank is self._rank:
            self._channel.rank = None
        self._channel = channel
        channel.rank = self._rank
        if self._ready is not None:
            channel.post(self._ready)

    def close(self) -> None:
        """Ends the connection to a leader in another process. Idempotent."""
        if self.remote is not None:
            self.remote.close()
            self.remote = None
