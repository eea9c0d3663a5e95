"""Filters: which replicas may not be chosen at all, whatever they would save."""

from __future__ import annotations

from enum import Enum

from dynamo_semkv.scoring.replica_view import ReplicaView


class FilteredBy(str, Enum):
    """Closed: the page and `explain` show it."""

    WRONG_ROLE = "wrong_role"
    NOT_ALLOWED = "not_allowed"
    LACKS_TAINT = "lacks_taint"
    OVERLOADED = "overloaded"
    NO_ROOM = "no_room"


def filtered_by(view: ReplicaView) -> FilteredBy | None:
    """The first reason against the replica; None: it may be chosen. Reasons that never change for a request come first,
    so the reason shown does not change either."""
    if view.wrong_role:
        return FilteredBy.WRONG_ROLE
    if view.not_allowed:
        return FilteredBy.NOT_ALLOWED
    if view.lacks_taint:
        return FilteredBy.LACKS_TAINT
    if view.overloaded:
        return FilteredBy.OVERLOADED
    if (
        0
        < view.total_blocks
        < view.active_decode_blocks + max(1, view.needed_blocks if view.active_decode_blocks else 1)
    ):
        # Running requests leave no room for this prompt's KV: a request sent there waits, or preempts one of them.
        return FilteredBy.NO_ROOM
    return None
