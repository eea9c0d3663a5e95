"""Blocks of another worker: what enters, and what never does. Over TCP on loopback, with engines that find every wrong
byte."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.report import Outcome
from tests.worker_connector.harness import MIB
from tests.worker_connector.pulling import (
    SECRET,
    TOKENS,
    between,
    desk,
    fetch_settings,
    hint,
    pull,
    results,
    rows_of,
    worker,
    workers,
)
from tests.worker_connector.scripted import llm_args
from tests.worker_connector.scripted_disk import settle
from worker_connector.fetch.transport import Answer, Sent


def test_what_one_worker_has_the_other_serves_bit_for_bit() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a) == 5
        assert rows_of(b) == rows_of(a)
        request = b.request(TOKENS)
        assert b.prefill(request) == 20  # its engine compares every byte that it reads
        b.finish(request)
        report = b.report_of(request)
        assert (report.outcome, report.confirmed, report.tier) == (Outcome.MATERIALIZED_EXACT, 20, Tier.EXTERNAL)
        numbers = b.parts.snapshot()
        assert numbers["attempt_counts"]["fetched_tokens"] == 20
        assert numbers["fetch"]["pulled_blocks"] == 5
        assert a.parts.snapshot()["fetch"]["serving"]["sent_blocks"] == 5
        b.check_balance()
        a.check_balance()


def test_what_was_pulled_is_counted_once_also_when_its_request_starts_again() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a) == 5
        request = b.request(TOKENS)
        assert b.prefill(request) == 20
        for _ in range(2):
            b.leader.reset(request)
        counts = b.parts.snapshot()["attempt_counts"]
        assert (counts["fetched_tokens"], counts["confirmed_tokens"]) == (20, 20)
        b.release(request)
        b.idle()


def test_only_what_is_missing_is_pulled_and_no_more_than_the_source_is_said_to_have() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        b.serve(TOKENS[:9])
        assert pull(b, a, blocks=4) == 2
        assert a.parts.snapshot()["fetch"]["serving"]["sent_blocks"] == 2
        assert pull(b, a, blocks=4) == 0
        assert pull(b, a) == 1
        assert results(b) == {"complete": 2, "nothing_missing": 1}
        assert b.ask(b.request(TOKENS)) == 20


def test_a_prompt_is_never_pulled_whole() -> None:
    """The last token is always computed."""
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a, TOKENS[:20]) == 4
        assert pull(b, a, TOKENS[:3]) == 0


def test_a_source_that_has_less_gives_what_it_has() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS[:13])
        assert pull(b, a) == 3
        assert results(b) == {"short": 1}


def test_several_exchanges_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.fetch.fetcher.MAX_KEYS", 2)
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        watched = between(b)
        assert pull(b, a) == 5
        assert watched.reads == 3
        assert rows_of(b) == rows_of(a)


@pytest.mark.parametrize("scope", [{"salt": "b"}, {"salt": None}, {"salt": "a", "adapter": 1}])
def test_blocks_of_another_tenant_or_adapter_are_neither_given_nor_taken(scope: dict[str, Any]) -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS, cache_salt="a")
        assert pull(b, a, **scope) == 0
        assert results(b) == {"short": 1}
        assert pull(b, a, salt="a") == 5
        assert b.ask(b.request(TOKENS, cache_salt="a")) == 20
        assert b.ask(b.request(TOKENS)) == 0


def test_asking_with_a_key_of_another_namespace_gets_nothing() -> None:
    """Whoever knows the key of a tenant's block must name its namespace too, and then holds its digest already."""
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS, cache_salt="a")
        life, _, _ = a.leader.cache()
        assert life is not None
        assert life.ledger is not None
        keys = tuple(entry.key for entry in sorted(life.ledger.entries(), key=lambda entry: entry.ordinal))
        between(b, before=lambda wanted: wanted._replace(keys=keys))
        assert pull(b, a) == 0
        assert desk(a).fetcher.counts == {}
        assert a.parts.snapshot()["fetch"]["serving"]["sent_blocks"] == 0


FOREIGN = [
    pytest.param({"tokens_per_block": 8}, id="block size"),
    pytest.param({"windows": (None, None)}, id="layout"),
]


@pytest.mark.parametrize("options", FOREIGN)
def test_another_layout_is_refused_at_the_door(options: dict[str, Any]) -> None:
    with workers(worker(), worker(**options)) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a) == 0
        assert results(b) == {"foreign": 1}


def test_another_shard_is_refused_at_the_door() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        between(b, before=lambda wanted: wanted._replace(shard="0/2"))
        assert pull(b, a) == 0
        assert results(b) == {"foreign": 1}


def test_another_model_has_other_names_for_everything() -> None:
    with workers(worker(), worker(args=llm_args(4, model="another"))) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a) == 0
        assert results(b) == {"short": 1}


def tokens_of(index: int) -> bytes:
    return b"".join(t.to_bytes(4, "little") for t in range(900 + index, 904 + index))


def forged_tokens(answer: Answer, rows: Any) -> Answer:
    """A key is a claim: under the right key come other tokens."""
    blocks = list(answer.blocks)
    blocks[2] = Sent(tokens_of(2), blocks[2].seal)
    return answer._replace(blocks=tuple(blocks))


def damaged_bytes(answer: Answer, rows: Any) -> None:
    rows[2, 3] ^= 1


@pytest.mark.parametrize(
    ("change", "result"), [(forged_tokens, "wrong_tokens"), (damaged_bytes, "wrong_bytes")], ids=["tokens", "bytes"]
)
def test_what_is_not_what_was_asked_for_ends_the_chain(change: Any, result: str) -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        between(b, after=change)
        assert pull(b, a) == 2
        assert results(b) == {result: 1}
        request = b.request(TOKENS)
        assert b.prefill(request) == 8
        b.finish(request)
        b.check_balance()


def test_too_many_or_too_few_blocks_in_an_answer_do_no_harm() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        between(b, after=lambda answer, rows: answer._replace(blocks=answer.blocks * 3))
        assert pull(b, a, blocks=3) == 3
        b.check_balance()


def test_a_damaged_block_is_not_sent() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        life, _, slab = a.leader.cache()
        assert life is not None
        assert life.ledger is not None
        assert slab is not None
        third = next(entry for entry in life.ledger.entries() if entry.ordinal == 2)
        slab.rows[third.slot, 0] ^= 1
        assert pull(b, a) == 2
        assert a.parts.snapshot()["fetch"]["damaged"] == 1


def test_wrong_secret() -> None:
    with workers(worker(), worker(fetch_settings(SECRET + b"!"))) as (a, b):
        a.serve(TOKENS)
        assert pull(b, a) == 0
        assert results(b) == {"unauthorized": 1}
        assert a.parts.snapshot()["fetch"]["serving"] == {"unauthorized": 1}
        assert pull(b, a) == 0  # and is left alone for a while
        assert results(b) == {"unauthorized": 1, "resting": 1}


ADDRESSES = [
    ("tcp://169.254.169.254:80", "address_not_allowed"),
    ("tcp://10.0.0.1:7011", "address_not_allowed"),
    ("tcp://[::ffff:10.0.0.1]:7011", "address_not_allowed"),
    ("tcp://[fe80::1]:7011", "address_not_allowed"),
    ("tcp://localhost:7011", "bad_address"),
    ("http://127.0.0.1:7011", "bad_address"),
    ("http://worker-a:8000/v1/data_transceiver_state", "bad_address"),
    ("tcp://127.0.0.1:0", "bad_address"),
    ("tcp://127.0.0.1:70000", "bad_address"),
    ("tcp://127.0.0.1:7011/x", "bad_address"),
    ("tcp://user@127.0.0.1:7011", "bad_address"),
    ("tcp://999.0.0.1:7011", "bad_address"),
    ("tcp://0177.0.0.1:7011", "bad_address"),
    ("tcp://2130706433:7011", "bad_address"),
    ("tcp://127.0.0.1:7011\n", "bad_address"),
    ("", "bad_address"),
]


@pytest.mark.parametrize(("address", "kind"), ADDRESSES)
def test_no_other_address_is_followed(address: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(worker()) as (b,):
        monkeypatch.setattr(desk(b).fetcher, "_transport", None)  # touched, it would be an error
        assert pull(b, address) == 0
        assert results(b) == {kind: 1}


def test_nothing_listens_there() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        gone = hint(a)
        a.parts.close()
        assert pull(b, gone.source_control_endpoint) == 0
        assert results(b) == {"unreachable": 1}


# resets


def test_lives_that_differ_between_exchanges_take_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.fetch.fetcher.MAX_KEYS", 2)
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)

        def second_life(wanted: Any) -> None:
            if watched.reads == 2:
                a.leader.weights_changed("other")
                a.serve(TOKENS)

        watched = between(b, before=second_life)
        assert pull(b, a) == 0
        assert watched.reads == 2
        assert results(b) == {"source_reset": 1}
        assert b.leader.resident_blocks() == 0
        b.check_balance()


def test_a_source_that_is_reset_while_it_is_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        read = desk(a).export.read

        def read_and_reset(wanted: Any, key: Any, into: Any) -> Any:
            found = read(wanted, key, into)
            if key == wanted.keys[3]:
                a.leader.weights_changed("other")
            return found

        monkeypatch.setattr(desk(a).export, "read", read_and_reset)
        assert pull(b, a) == 0
        assert results(b) == {"reset": 1}
        assert b.leader.resident_blocks() == 0


@pytest.mark.parametrize("change", ["reset_cache", "weights_changed"])
def test_a_reset_of_our_own_cache_takes_what_is_under_way_with_it(change: str) -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)

        def reset(answer: Answer, rows: Any) -> None:
            b.leader.reset_cache() if change == "reset_cache" else b.leader.weights_changed("new")

        between(b, after=reset)
        assert pull(b, a) == 0
        assert results(b) == {"own_reset": 1}
        assert b.leader.resident_blocks() == 0
        b.check_balance()


def test_a_reset_while_the_slots_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        _, _, slab = b.leader.cache()
        assert slab is not None
        seal = slab.seal

        def seal_and_reset(slots: Any) -> None:
            seal(slots)
            b.leader.reset_cache()

        monkeypatch.setattr(slab, "seal", seal_and_reset)
        assert pull(b, a) == 0
        assert results(b) == {"own_reset": 1}
        b.check_balance()


def test_a_new_pool_of_the_rank_is_not_written_to() -> None:
    """The engine rebuilt its pool, and slots of the old books are other blocks' in the new slab."""
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)

        def rebuild(answer: Answer, rows: Any) -> None:
            from worker_connector.engine_api.geometry import PoolGeometry

            b.rank.register(PoolGeometry.from_layout(b.layout()))

        between(b, after=rebuild)
        assert pull(b, a) == 0
        assert results(b) == {"own_reset": 1}
        _, _, slab = b.leader.cache()
        assert slab is not None
        assert slab.sealed == 0
        b.check_balance()


def test_a_fault_while_slots_are_written_costs_the_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        _, _, slab = b.leader.cache()
        monkeypatch.setattr(slab, "seal", lambda slots: 1 / 0)
        assert pull(b, a) == 0
        assert results(b) == {"error": 1}
        monkeypatch.undo()
        b.check_balance()
        assert pull(b, a) == 5


# room and company


def test_blocks_in_use_keep_their_slots() -> None:
    with workers(worker(), worker(slots=6)) as (a, b):
        a.serve(TOKENS)
        b.serve(list(range(100, 117)))  # four blocks, used before the hint: they may go
        b.serve(list(range(200, 209)))
        request = b.request(list(range(200, 209)))
        assert b.ask(request) == 8  # two blocks, leased
        assert pull(b, a) == 4
        assert results(b) == {"no_slot": 1}
        assert b.ask(b.request(TOKENS)) == 16


def test_what_a_request_is_just_saving_is_not_pulled_beside_it() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        request = b.request(TOKENS)
        b.ask(request)
        b.allocate(request, 0, 0, 8)
        b.iterate((request, 8))  # two blocks are computed, and not known to be
        assert pull(b, a) == 0
        assert results(b) == {"nothing_missing": 1}


def test_a_chain_that_is_saved_here_meanwhile_is_joined() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        between(b, after=lambda answer, rows: b.serve(TOKENS[:9]) and None)
        assert pull(b, a) == 3
        assert results(b) == {"complete": 1}
        assert b.ask(b.request(TOKENS)) == 20


def test_one_pull_for_equal_prompts() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        first, second = (desk(b).fetch(TOKENS, hint(a)) for _ in range(2))
        assert first is second
        assert desk(b).fetcher.run_pending() == 1
        assert results(b) == {"joined": 1, "complete": 1}


def test_a_hint_on_the_request_serves_the_next_one_and_the_scheduler_waits_for_nothing() -> None:
    with workers(worker(), worker()) as (a, b):
        a.serve(TOKENS)
        payload = {"source_control_endpoint": hint(a).source_control_endpoint, "block_hashes": [1, 2, 3, 4, 5]}
        action = {"action_id": "a1", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        assert b.ask(b.request(TOKENS, kv_hints=envelope)) == 0
        assert a.parts.snapshot()["fetch"]["serving"] == {}
        desk(b).fetcher.run_pending()
        assert b.ask(b.request(TOKENS)) == 20
        assert b.parts.snapshot()["hints"]["fetch"] == 1


def test_pulled_blocks_are_told_to_dynamo_and_go_to_disk(tmp_path: Any) -> None:
    class Told:
        def __init__(self) -> None:
            self.stored_blocks = 0
            self.removed_blocks = 0

        def stored(self, parent: Any, blocks: Any, *, salted: bool) -> None:
            self.stored_blocks += len(blocks)

        def removed(self, blocks: Any) -> None:
            self.removed_blocks += len(blocks)

        def cleared(self) -> None: ...

    with workers(worker(), worker(fetch_settings(disk_path=str(tmp_path), disk_bytes=MIB))) as (a, b):
        told = Told()
        b.leader.attach_residency(told)
        a.serve(TOKENS)
        assert pull(b, a) == 5
        assert told.stored_blocks == 5
        settle(b)
        assert b.parts.snapshot()["disk"]["blocks"] == 5
        b.rank.close()
