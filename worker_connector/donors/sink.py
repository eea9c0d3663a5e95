"""The two ways out of a leader: bytes to the bus, and host-tier residency to whoever publishes Dynamo KV events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo_semkv.bus.publishing import Publisher
from dynamo_semkv.contracts.keys import BlockKey


class ReportSink(Publisher, Protocol):
    """What the connector needs of `dynamo_semkv.bus.publisher.BusPublisher`. Thread-safe, never blocks, never
    raises."""

    on_loss: Callable[[str], None] | None
    """Called, on any thread, with a subject of which persistent messages were dropped, when there is room again."""

    @property
    def largest_payload(self) -> int:
        """Bytes; a larger message can never be stored."""

    def has_room(self, subject: str) -> bool:
        """May more be published of this subject without filling the buffer that all share?"""


class ResidencySink(Protocol):
    """Told, in order and on one thread, which blocks the host slab holds, so that Dynamo's own index can see them (host
    tier).

    `salted`: the blocks belong to a request with a cache salt, an adapter or media. An event that names them by their
    tokens alone would offer them to everybody (ai-dynamo/dynamo#8197), so a sink that cannot carry that scope must not
    publish them; it is told of their removal all the same.
    """

    def stored(self, parent: BlockKey | None, blocks: Sequence[tuple[BlockKey, bytes]], *, salted: bool) -> None:
        """Consecutive blocks that continue `parent` (None: block 0 first), each with its tokens as little-endian
        u32."""

    def removed(self, blocks: Sequence[BlockKey]) -> None:
        """These blocks are not resident any more, deepest first."""

    def cleared(self) -> None:
        """Nothing is resident any more."""
