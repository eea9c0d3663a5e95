"""One worker cannot take the room of the others' announcements, however many ranks it invents."""

from __future__ import annotations

import pytest

from dynamo_semkv.router import announcements
from dynamo_semkv.router.announcements import MAX_WAITING
from dynamo_semkv.router.replicas import ReplicaDirectory, Standing
from tests.router.fakes import A0, A1, B0, B1, announcement, card

LIVE = {A0: card("w-a"), A1: card("w-a"), B0: card("w-b"), B1: card("w-b")}
INVENTED = range(2, 20_002)


def honest(directory: ReplicaDirectory) -> None:
    for rank in (0, 1):
        directory.announce(announcement("w-a", rank))


def test_a_live_worker_announces_the_ranks_of_its_card_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    directory = ReplicaDirectory()
    directory.update_live(LIVE)
    honest(directory)
    for rank in INVENTED:
        directory.announce(announcement("w-b", rank))
    assert directory.standings("m") == {
        A0: Standing.OK,
        A1: Standing.OK,
        B0: Standing.UNANNOUNCED,
        B1: Standing.UNANNOUNCED,
    }
    assert directory.announced.counts == {"unlisted_rank": len(INVENTED)}
    assert len(caplog.records) == len(INVENTED).bit_length()
    assert "w-b, rank 2" in caplog.text
    assert "the ranks 0 to 1" in caplog.text


def test_20_000_invented_ranks_that_were_announced_before_the_start_make_nobody_unannounced() -> None:
    """A router that starts reads the past before it knows who is alive."""
    directory = ReplicaDirectory()
    honest(directory)
    for rank in INVENTED:
        directory.announce(announcement("w-b", rank))
    honest(directory)
    for rank in (0, 1):
        directory.announce(announcement("w-b", rank))
    assert directory.announced.waiting == MAX_WAITING
    directory.update_live(LIVE)
    assert set(directory.standings("m").values()) == {Standing.OK}
    assert directory.announced.waiting == 0


def test_of_workers_that_are_not_listed_the_one_with_most_gives_up_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_WAITING", 6)
    directory = ReplicaDirectory()
    honest(directory)
    for rank in range(9):
        directory.announce(announcement("w-b", rank))
    assert directory.announced.counts["dropped"] == 5
    directory.update_live({**LIVE, B0._replace(dp_rank=8): card("w-b")})
    assert directory.standings("m")[A0] is directory.standings("m")[A1] is Standing.OK
    assert directory.standings("m")[B0] is Standing.UNANNOUNCED, "the oldest of its own"
    assert directory.standings("m")[B0._replace(dp_rank=8)] is Standing.OK


def test_what_a_live_replica_said_is_kept_however_much_others_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_WAITING", 6)
    directory = ReplicaDirectory()
    directory.update_live({A0: card("w-a"), A1: card("w-a")})
    honest(directory)
    for number in range(50):
        directory.announce(announcement(f"x-{number}", 0))
    assert directory.view_of("m").eligible == {A0, A1}
    assert directory.announced.waiting == 6


def test_a_worker_whose_card_gets_more_ranks_may_announce_them() -> None:
    directory = ReplicaDirectory()
    directory.update_live({A0: card("w-a")})
    directory.announce(announcement("w-a", 1))
    directory.update_live({A0: card("w-a"), A1: card("w-a")})
    assert directory.standings("m")[A1] is Standing.UNANNOUNCED
    honest(directory)
    assert directory.view_of("m").eligible == {A0, A1}
