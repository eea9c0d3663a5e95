"""How long loads took, by the clock of the stream that copies: on a GPU the host is done long before the copies are.
And by tier: what came up from disk or from another worker took the time of that, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import MaterializationReport
from tests.worker_connector.parking import finish, warm
from tests.worker_connector.pulling import TOKENS as PULLED
from tests.worker_connector.pulling import desk, pull, worker, workers
from tests.worker_connector.rank.test_late_copies import SECONDS_A_COPY, TOKENS, Late, ManualStream
from tests.worker_connector.rank.test_layer_hooks import Layered
from tests.worker_connector.scripted import ScriptedEngine
from tests.worker_connector.scripted_disk import PROMPT, crowd, settle, tier_of, with_disk

BLOCKS = 10
OTHERS = [*TOKENS[:20], *range(100, 121)]
"""The first five blocks are those of `TOKENS`."""


def reports_of(late: Late, *requests: Any) -> list[MaterializationReport]:
    late.engine.rank.forward_done(late.engine.metadata, None)
    late.stream.land()
    late.engine.rank.poll()
    return [late.engine.report_of(request) for request in requests]


def copies_a_block(late: Late) -> int:
    planes = late.engine.rank._geometry.planes  # type: ignore[union-attr]
    return len(planes)


def test_load_on_a_stream_that_is_behind_the_host_is_timed_by_that_stream() -> None:
    late = Late()
    late.engine.serve(TOKENS)
    late.go_late()
    (report,) = reports_of(late, late.ask_and_schedule(TOKENS))
    assert report.confirmed == 40
    assert report.load_seconds == BLOCKS * copies_a_block(late) * SECONDS_A_COPY


def test_loads_of_one_pass_share_its_time_by_their_blocks() -> None:
    late = Late()
    late.engine.serve(TOKENS)
    late.engine.serve(OTHERS)
    late.go_late()
    engine, requests = late.engine, []
    for tokens in (TOKENS, OTHERS[:21]):
        request = engine.request(tokens)
        offered = engine.ask(request)
        engine.allocate(request, 0, offered, len(tokens))
        engine.schedule(request, len(tokens) - offered)
        requests.append(request)
    engine.rank.start_load(engine.build(), None)
    reports = reports_of(late, *requests)
    a_block = copies_a_block(late) * SECONDS_A_COPY
    assert [report.load_seconds for report in reports] == [BLOCKS * a_block, 5 * a_block]


def test_loads_by_layer_are_timed_too() -> None:
    layered = Layered()
    layered.prove()
    layered.go_late()
    request = layered.load(TOKENS)
    copies = layered.stream.handed
    layered.stream.land()
    layered.run_pass()
    layered.engine.rank.poll()
    assert layered.engine.report_of(request).load_seconds == copies * SECONDS_A_COPY > 0


class Counted(ManualStream):
    """Lands at once."""

    def ticket(self) -> Any:
        self.land()
        return super().ticket()


def test_parked_load_is_timed_by_the_stream_that_copies_beside_the_passes() -> None:
    engine = warm()
    engine.loads._side = stream = Counted()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.seconds = 1.0  # it waited so long for its turn
    engine.go()
    engine.idle()
    engine.resume(request)
    finish(engine, request)
    report = engine.report_of(request)
    assert report.load_seconds == stream.handed * SECONDS_A_COPY > 0


def test_parked_load_that_was_repeated_took_all_the_time_since_its_order() -> None:
    engine = warm()
    request = engine.request(TOKENS)
    engine.park(request)
    engine.iterate()
    engine.seconds = 2.5
    engine.idle()
    engine.resume(request)
    engine.go()
    finish(engine, request)
    assert engine.rank.counts["repeated_loads"] == 1
    assert engine.report_of(request).load_seconds == 2.5


def timed(engine: ScriptedEngine) -> Counted:
    engine.rank._stream = stream = Counted()
    return stream


def test_load_from_disk_took_the_time_of_the_disk_and_the_next_one_does_not(tmp_path: Path) -> None:
    engine = with_disk(tmp_path)
    engine.serve(PROMPT)
    crowd(engine)
    now, stream = 100.0, timed(engine)
    tier_of(engine)._clock = lambda: now
    asked = engine.request(PROMPT)
    assert engine.ask(asked) == 0
    now += 3.0
    settle(engine)
    assert engine.prefill(asked) == 40
    asked.tokens.append(1)
    engine.finish(asked)
    report, copied = engine.report_of(asked), stream.handed * SECONDS_A_COPY
    assert (report.tier, report.confirmed) == (Tier.DISK, 40)
    assert report.load_seconds == pytest.approx(3.0 + copied)
    again = engine.report_of(engine.serve(PROMPT))
    assert (again.tier, again.load_seconds) == (Tier.HOST_PINNED, copied)


def test_load_of_a_peer_s_blocks_took_the_time_of_the_pull_and_the_next_one_does_not() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(PULLED)
        now, stream = iter(float(10 + 4 * n) for n in range(100)), timed(b)
        desk(b).fetcher._tier._clock = lambda: next(now)
        assert pull(b, a) == 5
        report = b.report_of(b.serve(PULLED))
        copied = stream.handed * SECONDS_A_COPY
        assert (report.tier, report.confirmed) == (Tier.EXTERNAL, 20)
        assert report.load_seconds == pytest.approx(4.0 + copied)
        again = b.report_of(b.serve(PULLED))
        assert (again.tier, again.load_seconds) == (Tier.HOST_PINNED, copied)
