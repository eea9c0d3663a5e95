"""Hints to pull at the Dynamo worker's door: whose word counts, how long a request waits, and what Dynamo's router is
told."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any

import pytest

from dynamo_semkv.contracts.hints import FetchHint
from worker_connector.fetch import router_hint
from worker_connector.reference_engine.dynamo_worker.fetch import FetchAhead, endpoints_of, peer_fetches
from worker_connector.reference_engine.dynamo_worker.request import Submission, merged_hints
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.requests.hints import HintReader

PAYLOAD = {"source_control_endpoint": "tcp://127.0.0.1:7011", "block_hashes": [5000, 5001]}


def envelope(*types: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    actions = [
        {"action_id": f"a{n}", "action_type": kind, "action_version": "1.0", "payload": payload or PAYLOAD}
        for n, kind in enumerate(types)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


class Fetch:
    def __init__(self, future: Future[int] | None = None, endpoint: str | None = "tcp://127.0.0.1:1") -> None:
        self.future = future
        self.asked: list[tuple[list[int], FetchHint, str | None]] = []
        self._endpoint = endpoint
        self.reader = HintReader(fetches=True)

    def fetch(self, tokens: list[int], hint: FetchHint, *, salt: str | None = None) -> Future[int] | None:
        self.asked.append((tokens, hint, salt))
        return self.future

    def wait_open(self, timeout: float) -> str | None:
        return self._endpoint


def done(blocks: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(blocks)
    return future


def asked(rank: int | None = None, salt: str | None = None) -> Submission:
    return Submission([1, 2, 3], 4, SamplingParams(), frozenset(), 0, rank, salt)


async def before(fetches: list[Fetch], request: dict[str, Any], what: Submission, wait: float = 5.0) -> FetchAhead:
    ahead = FetchAhead(fetches, wait)  # type: ignore[arg-type]
    await ahead.before(what, merged_hints(request)[0])
    return ahead


async def test_dynamos_hint_is_followed_with_the_requests_own_salt_and_rank() -> None:
    fetches = [Fetch(done(0)), Fetch(done(2))]
    ahead = await before(fetches, {"kv_hint": envelope("kv.later", "kv.fetch")}, asked(1, "tenant"))
    assert fetches[0].asked == []
    ((tokens, hint, salt),) = fetches[1].asked
    assert (tokens, hint.block_hashes, salt) == ([1, 2, 3], [5000, 5001], "tenant")
    assert ahead.waited == {"arrived": 1, "late": 0, "failed": 0}
    assert fetches[1].reader.counts == {"unknown_action": 1, "fetch": 1}


FROM_A_CLIENT = [
    {"extra_args": {"semkv": envelope("kv.fetch")}},
    {"extra_args": {"kv_hint": envelope("kv.fetch"), "kv_hints": envelope("kv.fetch")}},
    {"extra_args": {"nvext": {"kv_hint": envelope("kv.fetch"), "semkv": envelope("kv.fetch"), "router_hint": PAYLOAD}}},
    {"extra_args": {"kv_transfer_params": {"kv_hint": envelope("kv.fetch"), "router_hint": PAYLOAD}}},
    {"nvext": {"kv_hint": envelope("kv.fetch")}, "router_hint": PAYLOAD, "kv_hints": envelope("kv.fetch")},
    {"annotations": ["kv_hint:" + json.dumps(envelope("kv.fetch"))], "source_control_endpoint": "tcp://127.0.0.1:1"},
]


@pytest.mark.parametrize("request_", FROM_A_CLIENT)
async def test_an_address_that_a_client_could_write_is_never_used(request_: dict[str, Any]) -> None:
    fetches = [Fetch(done(1))]
    await before(fetches, request_, asked())
    assert fetches[0].asked == []


def test_a_fetch_in_our_own_envelope_is_said_to_be_refused_and_the_rest_counts() -> None:
    hints, refused = merged_hints(
        {"extra_args": {"semkv": envelope("semkv.donor", "kv.fetch")}, "kv_hint": envelope("kv.fetch")}
    )
    assert hints is not None
    assert [action.action_type for action in hints.actions] == ["semkv.donor", "kv.fetch"]
    assert len(refused) == 1
    assert "only Dynamo's router" in refused[0]


async def test_a_request_waits_for_its_budget_and_the_pull_goes_on() -> None:
    slow: Future[int] = Future()
    ahead = await before([Fetch(slow)], {"kv_hint": envelope("kv.fetch")}, asked(), wait=0.01)
    assert ahead.waited == {"arrived": 0, "late": 1, "failed": 0}
    assert not slow.cancelled()
    slow.set_result(3)


async def test_no_wait_is_no_wait() -> None:
    fetches = [Fetch(Future())]
    ahead = await before(fetches, {"kv_hint": envelope("kv.fetch")}, asked(), wait=0.0)
    assert len(fetches[0].asked) == 1
    assert ahead.waited == {"arrived": 0, "late": 0, "failed": 0}


async def test_a_fault_of_the_desk_costs_the_request_nothing() -> None:
    class Broken(Fetch):
        def fetch(self, *_: object, **__: object) -> Future[int] | None:
            raise RuntimeError("a fault of ours")

    ahead = await before([Broken()], {"kv_hint": envelope("kv.fetch")}, asked())
    assert ahead.waited == {"arrived": 0, "late": 0, "failed": 1}


async def test_of_several_ranks_the_request_must_name_its_own() -> None:
    fetches = [Fetch(done(1)), Fetch(done(1))]
    await before(fetches, {"kv_hint": envelope("kv.fetch")}, asked())
    assert [fetch.asked for fetch in fetches] == [[], []]


async def test_a_request_that_is_cancelled_while_it_waits_leaves_the_pull_alone() -> None:
    slow: Future[int] = Future()
    task = asyncio.ensure_future(before([Fetch(slow)], {"kv_hint": envelope("kv.fetch")}, asked(), wait=60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not slow.cancelled()


@pytest.mark.parametrize("bad", [{"block_hashes": "x"}, {"source_control_endpoint": 7, "block_hashes": []}])
async def test_a_payload_that_is_none_costs_only_itself(bad: dict[str, Any]) -> None:
    fetches = [Fetch(done(1))]
    await before(fetches, {"kv_hint": envelope("kv.fetch", payload=bad)}, asked())
    assert fetches[0].asked == []


async def test_a_worker_of_which_a_rank_does_not_listen_offers_nothing() -> None:
    good, bad = Fetch(), Fetch(endpoint=None)
    assert await endpoints_of([good, good]) == {0: "tcp://127.0.0.1:1", 1: "tcp://127.0.0.1:1"}  # type: ignore[list-item]
    assert await endpoints_of([good, bad]) == {}  # type: ignore[list-item]
    assert peer_fetches([object()]) == []


class Card:
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def set_engine_specific(self, key: str, value: str) -> None:
        self.said.append((key, value))


def test_what_dynamos_router_is_told() -> None:
    """As dynamo/vllm/kv_hints.py of 1.6.1 tells it, the capability last."""
    card = Card()
    router_hint.publish_router_hint(card, {1: "tcp://127.0.0.1:7012", 0: "tcp://127.0.0.1:7011"})
    assert [(key, json.loads(value)) for key, value in card.said] == [
        ("router_hint_source_control_endpoints", {"0": "tcp://127.0.0.1:7011", "1": "tcp://127.0.0.1:7012"}),
        ("router_hint_worker_type", "aggregated"),
        ("router_hint", True),
    ]
    with pytest.raises(ValueError, match="worker_type is 'agg'; it must be one of aggregated"):
        router_hint.publish_router_hint(card, {}, "agg")


def test_the_keys_are_dynamos() -> None:
    constants = pytest.importorskip("dynamo.common.constants")
    assert constants.KV_HINT_TRANSFER_CAPABILITY_KEY == router_hint.CAPABILITY
    assert constants.KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY == router_hint.WORKER_TYPE
    assert constants.KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY == router_hint.SOURCE_ENDPOINTS
