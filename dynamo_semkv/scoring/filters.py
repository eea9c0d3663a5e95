"""Filters: which replicas may not be chosen at all, whatever they would save. A filter is a callable with one answer."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from dynamo_semkv.scoring.candidate import ReplicaView


class FilteredBy(str, Enum):
    """Closed: the page and `explain` show it."""

    OVERLOADED = "overloaded"
    NO_ROOM = "no_room"


Filter = Callable[[ReplicaView], FilteredBy | None]


def overloaded(view: ReplicaView) -> FilteredBy | None:
    return FilteredBy.OVERLOADED if view.overloaded else None


def no_room(view: ReplicaView) -> FilteredBy | None:
    """Running requests hold every KV block: a request sent there waits, or preempts one of them."""
    return FilteredBy.NO_ROOM if 0 < view.total_blocks <= view.active_decode_blocks else None


FILTERS: tuple[Filter, ...] = (overloaded, no_room)


def filtered_by(view: ReplicaView, filters: tuple[Filter, ...] = FILTERS) -> FilteredBy | None:
    """The first filter that objects."""
    return next((reason for check in filters if (reason := check(view)) is not None), None)
