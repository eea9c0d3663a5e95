"""Filters: which replicas may not be chosen at all, whatever they would save. A filter is a callable with one answer."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from dynamo_semkv.scoring.candidate import ReplicaView


class FilteredBy(str, Enum):
    """Closed: the page and `explain` show it."""

    WRONG_ROLE = "wrong_role"
    NOT_ALLOWED = "not_allowed"
    LACKS_TAINT = "lacks_taint"
    OVERLOADED = "overloaded"
    NO_ROOM = "no_room"


Filter = Callable[[ReplicaView], FilteredBy | None]


def wrong_role(view: ReplicaView) -> FilteredBy | None:
    return FilteredBy.WRONG_ROLE if view.wrong_role else None


def not_allowed(view: ReplicaView) -> FilteredBy | None:
    return FilteredBy.NOT_ALLOWED if view.not_allowed else None


def lacks_taint(view: ReplicaView) -> FilteredBy | None:
    return FilteredBy.LACKS_TAINT if view.lacks_taint else None


def overloaded(view: ReplicaView) -> FilteredBy | None:
    return FilteredBy.OVERLOADED if view.overloaded else None


def no_room(view: ReplicaView) -> FilteredBy | None:
    """Running requests hold every KV block: a request sent there waits, or preempts one of them."""
    return FilteredBy.NO_ROOM if 0 < view.total_blocks <= view.active_decode_blocks else None


FILTERS: tuple[Filter, ...] = (wrong_role, not_allowed, lacks_taint, overloaded, no_room)
"""What never changes for a request first: the reason that is told is then the one that stays."""


def filtered_by(view: ReplicaView, filters: tuple[Filter, ...] = FILTERS) -> FilteredBy | None:
    """The first filter that objects."""
    for check in filters:
        reason = check(view)
        if reason is not None:
            return reason
    return None
