"""A connection that never says a whole request is closed at the second look; one that did is not."""

from __future__ import annotations

from dynamo_semkv.dashboard.idle import Unheard


class Connection:
    """As much of aiohttp's RequestHandler as is used."""

    def __init__(self) -> None:
        self.transport: Connection | None = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted, self.transport = True, None


def test_silent_ones_are_closed_and_those_that_asked_stay() -> None:
    open_ones = [Connection(), Connection()]
    silent, asked = open_ones
    unheard = Unheard(lambda: open_ones, 1.0)
    unheard.look()
    unheard.heard(asked)
    late = Connection()
    open_ones.append(late)
    unheard.look()
    assert [it.aborted for it in (silent, asked, late)] == [True, False, False]
    open_ones.remove(silent)
    unheard.look()
    unheard.look()
    assert [it.aborted for it in (asked, late)] == [False, True]
    assert unheard.closed == 2


def test_nothing_is_remembered_of_connections_that_are_gone() -> None:
    open_ones = [Connection() for _ in range(9)]
    unheard = Unheard(lambda: open_ones, 1.0)
    for connection in open_ones:
        unheard.heard(connection)
    open_ones.clear()
    unheard.look()
    assert unheard._heard == unheard._waiting == set()
