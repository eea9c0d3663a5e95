"""A gateway that chooses both halves of a disaggregated request by itself, with our advice for the prefill worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.graphs.test_gateway import PROMPT, advise, advise_on_donor, route
from tests.graphs.traffic import PATIENT, forget_device, get, post

pytestmark = [pytest.mark.graph, pytest.mark.slow]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalGraph]:
    settings = GraphSettings(
        model="tiny",
        threads=1,
        workers=1,
        decode_workers=1,
        direct=True,
        blocks_per_rank=160,
        overrides={**LOW_GATE, **PATIENT, "outcome": {"report_ttl_seconds": 30.0}},
    )
    with LocalGraph(settings, run_dir=tmp_path_factory.mktemp("gateway"), model_dir=model_dir) as started:
        yield started


def dispatch(graph: LocalGraph, prefill: dict[str, Any]) -> dict[str, Any]:
    instances = get(f"{graph.frontend_url}/health")["instances"]
    (decode,) = [it for it in instances if (it["component"], it["endpoint"]) == ("backend", "generate")]
    headers = {
        "x-dynamo-worker-instance-id": str(decode["instance_id"]),
        "x-dynamo-dp-rank": "0",
        "x-dynamo-prefill-instance-id": prefill["worker_id"],
        "x-dynamo-prefill-dp-rank": str(prefill["dp_rank"]),
    }
    body = {"model": graph.settings.served_model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
    return post(f"{graph.frontend_url}/v1/completions", body, **headers)


def test_the_prefill_worker_that_was_advised_confirms_what_it_loaded(graph: LocalGraph) -> None:
    cold = advise(graph, PROMPT)
    first = dispatch(graph, cold["dynamo"])
    # The next route has the same prompt and names its replica: the report of this one would be given to it if it came
    # so late.
    assert route(graph, cold["route_id"])["outcome"] == "no_donor"
    forget_device(graph)
    warm = advise_on_donor(graph, PROMPT)
    assert (warm["replica"]["worker_id"], warm["replica"]["dp_rank"]) == tuple(cold["dynamo"].values())
    again = dispatch(graph, warm["replica"])
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 32 * 32
    closed = route(graph, warm["route_id"])
    assert (closed["outcome"], closed["report"]["confirmed"]) == ("materialized_exact", len(PROMPT) // 32 * 32)
