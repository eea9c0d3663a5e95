"""A connection that never says a whole request is closed at the second look; one that did is not."""

from __future__ import annotations

from dynamo_semkv.dashboard.idle_connections import IdleConnections


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
    idle = IdleConnections(lambda: open_ones, 1.0)
    idle.close_idle()
    idle.used(asked)
    late = Connection()
    open_ones.append(late)
    idle.close_idle()
    assert [it.aborted for it in (silent, asked, late)] == [True, False, False]
    open_ones.remove(silent)
    idle.close_idle()
    idle.close_idle()
    assert [it.aborted for it in (asked, late)] == [False, True]
    assert idle.closed == 2


def test_nothing_is_remembered_of_connections_that_are_gone() -> None:
    open_ones = [Connection() for _ in range(9)]
    idle = IdleConnections(lambda: open_ones, 1.0)
    for connection in open_ones:
        idle.used(connection)
    open_ones.clear()
    idle.close_idle()
    assert idle._used == idle._waiting == set()
