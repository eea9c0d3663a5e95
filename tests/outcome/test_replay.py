"""Streams that are each in order come out in one order, and not before it is sure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_semkv.outcome.replay import Replay

TIMES = st.lists(st.floats(0, 100), max_size=12).map(sorted)


@given(TIMES, TIMES, st.data())
def test_merged_in_order_of_time_however_one_runs_ahead(
    left: list[float], right: list[float], data: st.DataObject
) -> None:
    replay: Replay[float] = Replay(["left", "right"])
    waiting = {"left": list(left), "right": list(right)}
    out: list[float] = []
    while waiting:
        stream = data.draw(st.sampled_from(sorted(waiting)))
        if waiting[stream]:
            replay.add(stream, waiting[stream][0], waiting[stream].pop(0))
        else:
            replay.caught_up(stream)
            del waiting[stream]
        out += [item for _, item in replay.ready()]
    assert out == sorted(left + right)
    assert replay.done


def test_nothing_is_sure_while_a_stream_is_silent() -> None:
    replay: Replay[str] = Replay(["routes", "reports"])
    replay.add("routes", 1.0, "a")
    assert replay.ready() == []
    replay.add("reports", 2.0, "b")
    assert replay.ready() == [(1.0, "a")]
    assert not replay.done
    replay.caught_up("routes")
    assert replay.ready() == [(2.0, "b")]


def test_equal_times_keep_their_order() -> None:
    replay: Replay[int] = Replay(["one"])
    for number in range(20):
        replay.add("one", 5.0, number)
    replay.caught_up("one")
    assert [item for _, item in replay.ready()] == list(range(20))
