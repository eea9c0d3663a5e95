"""A healthy graph: chats are served, KV is seen by Dynamo tier by tier and tenant by tenant, sockets and logs are
clean.

The tests share one graph; the last one reads what all of them left in the logs.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bench.client import Answer
from dynamo_semkv.cli import main
from graphs.local.graph import LocalGraph
from tests.graphs.traffic import Traffic, ask, get, routes, send, snapshot, wait_until
from tests.router.graph.processes import listening_sockets

pytestmark = [pytest.mark.graph, pytest.mark.slow]

BLOCK = 32


def route_of(graph: LocalGraph, request_id: str | None) -> dict[str, Any]:
    """The closed route of a request that was dispatched once."""
    found = wait_until(f"route of {request_id}", lambda: routes(graph, "router-0", request_id))
    assert len(found) == 1
    return dict(found[0])


def exact(route: dict[str, Any]) -> tuple[int, int]:
    """What Dynamo said that the replica had: (device, beyond that in host memory), in tokens."""
    return route["opened"]["exact_device_tokens"], route["opened"]["exact_host_tokens"]


def ranks(graph: LocalGraph) -> list[dict[str, Any]]:
    """What each rank of each worker counts."""
    return [rank for worker in graph.worker_names for rank in get(f"{graph.status_url(worker)}/engine/semkv")["ranks"]]


def device_blocks(graph: LocalGraph) -> list[int]:
    """Reusable blocks on the device."""
    return [rank["engine"]["cached_blocks"] for rank in ranks(graph)]


def wait_told(graph: LocalGraph) -> None:
    """Until the workers have told Dynamo of every unsalted block of both tiers. What they tell after this is applied
    after it."""
    wait_until(
        "host blocks told",
        lambda: all(
            rank["connector"]["open_saves"] == 0
            and rank["events"]["host"]["announced"] + rank["events"]["host"]["skipped"].get("salted", 0)
            >= rank["connector"]["ledger"]["resident"]
            for rank in ranks(graph)
        ),
    )


def removals_applied(graph: LocalGraph, router: str) -> float:
    """Removal events that this router's copy of Dynamo's index has applied."""
    with urllib.request.urlopen(f"{graph.status_url(router)}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    counted = [
        line
        for line in lines
        if line.startswith("dynamo_component_kv_cache_events_applied{")
        and 'event_type="removed"' in line
        and 'status="ok"' in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in counted)


def reset_device_caches(graph: LocalGraph) -> None:
    """Every device block that no request holds is gone, and every router's Dynamo knows, of the host blocks too; what
    the host slabs hold stays."""
    wait_told(graph)
    holders = sum(blocks > 0 for blocks in device_blocks(graph))
    before = {router: removals_applied(graph, router) for router in graph.router_names}
    for worker in graph.worker_names:
        url = f"{graph.status_url(worker)}/engine/reset_prefix_cache"
        request = urllib.request.Request(url, data=b"{}", headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 200
    wait_until("empty device caches", lambda: not any(device_blocks(graph)))
    for router in graph.router_names:
        wait_until(
            f"{router} knows",
            lambda router=router: removals_applied(graph, router) >= before[router] + holders,  # type: ignore[misc]
        )


def test_a_chat_is_served_and_its_prefix_is_reused(graph: LocalGraph) -> None:
    first = send(graph, ask(1, max_tokens=8))
    assert first.ok, first
    assert first.text
    assert (first.finish_reason, first.cached_tokens) == ("length", 0)
    assert first.prompt_tokens is not None

    def reused() -> Answer | None:
        again = send(graph, ask(1, max_tokens=8))
        assert again.text == first.text
        return again if again.cached_tokens else None

    # A request that overtakes the event of the first one's blocks may be sent to the other replica.
    again = wait_until("Dynamo sends it to where its blocks are", reused)
    assert again.cached_tokens == (first.prompt_tokens - 1) // BLOCK * BLOCK
    assert set(graph.urls) == {"frontend", "nats", "router-0 page", "router-1 page"}


def test_a_tenants_blocks_are_its_own(graph: LocalGraph) -> None:
    """On the engine, in Dynamo's index of the device tier, and in that of the host tier."""
    assert send(graph, ask(2, max_tokens=4, salt="tenant-a")).cached_tokens == 0

    def seen_with_the_salt() -> bool:
        again = send(graph, ask(2, max_tokens=4, salt="tenant-a"))
        return exact(route_of(graph, again.request_id))[0] == again.cached_tokens > 0

    wait_until("Dynamo shows the tenant its own blocks", seen_with_the_salt)
    wait_told(graph)
    for salt in (None, "tenant-b"):
        other = send(graph, ask(2, max_tokens=4, salt=salt))
        assert other.cached_tokens == 0
        route = route_of(graph, other.request_id)
        assert exact(route) == (0, 0)
        assert route["opened"]["placed_tokens"] == route["report"]["confirmed"] == 0


def test_what_left_the_device_is_loaded_from_the_host(graph: LocalGraph) -> None:
    """Dynamo sees the host tier, sends the request to the same replica, and the engine starts behind the loaded
    blocks."""
    cold = send(graph, ask(3, max_tokens=8))
    assert cold.cached_tokens == 0
    served = route_of(graph, cold.request_id)
    reset_device_caches(graph)
    loaded = send(graph, ask(3, max_tokens=8))
    assert loaded.text == cold.text
    route = route_of(graph, loaded.request_id)
    whole = (loaded.prompt_tokens or 0) // BLOCK * BLOCK
    assert exact(route) == (0, whole)
    assert whole > 0
    assert route["outcome"] == "materialized_exact"
    assert route["report"]["confirmed"] == loaded.cached_tokens == whole
    assert route["served_by"] == served["served_by"]


def test_a_device_prefix_goes_on_in_the_host_tier(graph: LocalGraph) -> None:
    """A short prompt brings the common prefix back onto the device; Dynamo counts the rest of the long one as host
    blocks."""
    long = ask(4, max_tokens=4)
    text = long.messages[0]["content"]
    short = type(long)(({"role": "user", "content": text[: len(text) // 2]},), None, 4)
    first = send(graph, long)
    reset_device_caches(graph)
    wait_until(
        "the short prefix is seen on the device", lambda: exact(route_of(graph, send(graph, short).request_id))[0]
    )
    again = send(graph, long)
    route = route_of(graph, again.request_id)
    device, host = exact(route)
    assert device > 0
    assert host > 0
    assert device + host == (again.prompt_tokens or 0) // BLOCK * BLOCK == again.cached_tokens
    assert again.text == first.text


def test_a_load_is_timed_against_its_replicas_cold_rate(graph: LocalGraph) -> None:
    """Cold routes show each router the rate, by its own clock or by the bus; the record of a load says what it
    saved."""
    for seed in range(30, 34):
        cold = route_of(graph, send(graph, ask(seed, max_tokens=2)).request_id)
        assert (cold["ttft_class"], cold["saving"]) == ("cold", None)
        assert cold["observed"]["queued_tokens"] is not None
    reset_device_caches(graph)
    route = route_of(graph, send(graph, ask(30, max_tokens=2)).request_id)
    assert route["outcome"] == "materialized_exact"
    saving = route["saving"]
    assert saving["seconds_per_token"] > 0.0
    assert -1.0 <= saving["share"] <= 1.0
    assert saving["saved_seconds"] == pytest.approx(saving["cold_seconds"] - route["ttft_seconds"])
    for router in graph.router_names:
        known = wait_until(
            f"{router} knows a rate", lambda router=router: snapshot(graph, router)["calibration"]["prefill"]
        )  # type: ignore[misc]
        assert all(row["tokens_per_second"] > 0.0 for row in known)
        assert snapshot(graph, router)["calibration"]["tiers"]["host_pinned"]["loads"] > 0.0


def test_everything_listens_on_loopback_only(graph: LocalGraph) -> None:
    pids = [graph.nats.pid, *(process.pid for process in graph.processes.values())]
    addresses = [address for found in listening_sockets(pids).values() for address in found]
    assert len(addresses) >= len(pids)
    assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}


def test_a_bad_request_is_told_which_field(graph: LocalGraph) -> None:
    """Not in the log test's way: a client's fault is answered, and Dynamo logs it as an ERROR of its own."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "presence_penalty": 1}'
    request = urllib.request.Request(
        f"{graph.frontend_url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
    )
    before = graph.trouble()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 400
    assert b"sampling_options.presence_penalty" in caught.value.read()
    assert before == [], "errors before the bad request"


def test_doctor_finds_a_healthy_graph_healthy_and_a_page_that_is_away_missing(
    graph: LocalGraph, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("SEMKV_", "DYN_", "NATS_"))]:
        monkeypatch.delenv(name)
    doctor = ["doctor", "--config", str(graph.config_path), "--url", graph.page_url(), "--json"]
    capsys.readouterr()
    assert main(doctor) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding for finding in findings if finding["level"] != "ok"] == []
    assert {"bus", "streams", "connectors", "replicas"} <= {finding["check"] for finding in findings}
    assert main(["doctor", "--config", str(graph.config_path), "--url", "http://127.0.0.1:9"]) == 1
    assert "no router's page answers" in capsys.readouterr().out


def test_no_restart_was_needed_and_ports_stay_over_one(graph: LocalGraph) -> None:
    assert all(process.running for process in graph.processes.values())
    urls = dict(graph.urls)
    graph.restart("router-1")
    graph.wait_ready()
    assert graph.urls == urls
    assert Path(graph.run_dir / "router-1.log").exists()
    assert send(graph, ask(5, max_tokens=4)).ok


def test_a_worker_told_to_stop_finishes_what_it_runs(graph: LocalGraph) -> None:
    """SIGTERM under traffic: it leaves discovery, its requests end or move, it exits cleanly, and nobody sees any of
    it."""
    traffic = Traffic(graph, first_seed=5000)
    traffic.wait_for(8)
    assert graph.processes["worker-0"].terminate(patience_seconds=60.0) == 0
    traffic.wait_for(8)
    graph.start("worker-0")
    graph.wait_ready()
    traffic.wait_for(8)
    traffic.finish()
    log = graph.log_text("worker-0")
    assert "requests in flight" in log
