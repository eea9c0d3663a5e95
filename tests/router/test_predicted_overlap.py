"""`dynamo.kv_router.router_predicted_ttl_seconds`: what Dynamo has just placed counts as cached there, before the
engine says so."""

from __future__ import annotations

import json

import pytest

from dynamo_semkv.config.load import build
from dynamo_semkv.router.process import edge_settings
from tests.router.conftest import OpenGraph
from tests.router.graph.processes import wait_until

RANKS = 2
"""What a worker of the tests has."""
PROMPT = list(range(100))
"""What the test client's default chat is tokenized to: three whole blocks of 32."""


@pytest.mark.graph
@pytest.mark.parametrize(("seconds", "blocks"), [(None, 0), (120.0, 3)])
def test_a_prompt_on_its_way_counts_where_it_was_sent(
    open_graph: OpenGraph, seconds: float | None, blocks: int
) -> None:
    """The test's workers publish no KV events, so whatever overlap there is was predicted."""
    config = build({"dynamo": {"kv_router": {"router_predicted_ttl_seconds": seconds}}})
    with open_graph() as graph:
        for n in range(2):
            graph.worker(f"w{n}")
        router = graph.router("r0", "--kv-router", json.dumps(dict(edge_settings(config).kv_router)))
        graph.frontend(routers=1)
        # A worker may serve before its card is read, and the overlap is told of ranks with a card.
        wait_until("the cards of both workers", lambda: len(graph.query(router, PROMPT)["live"]) == 2 * RANKS)
        assert graph.chat()[0] == 200
        (record,) = graph.dispatches()
        overlap = graph.query(router, PROMPT)["overlap"]
        assert overlap.pop("/".join(record["replica"])) == [blocks, 0, 0]
        assert set(map(tuple, overlap.values())) == {(0, 0, 0)}, "nowhere else"
