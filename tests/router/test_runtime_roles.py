"""In front of which workers a router may stand, over real processes: their cards decide, and what cannot work is said
at start."""

from __future__ import annotations

import pytest

from tests.router.conftest import OpenGraph

pytestmark = pytest.mark.graph


@pytest.mark.parametrize(
    ("role", "worker_name", "says"),
    [
        ("Prefill", "m-prefill", r"model m is prefilled by test\.semkv\.generate"),
        (
            "Prefill",
            "m",
            r"EdgeError: model\.name: 'm', expected the name that the decode workers offer; .* theirs is 'm'",
        ),
        ("Decode", "m", r"workers of test\.backend\.generate compute no prompts so far; waiting"),
        ("Aggregated", "m", r"model m is served by test\.semkv\.generate"),
    ],
)
def test_what_a_router_makes_of_the_workers_role(open_graph: OpenGraph, role: str, worker_name: str, says: str) -> None:
    with open_graph() as graph:
        worker = graph.worker("w0", "--role", role, "--model-name", worker_name, "--ranks", "1")
        worker.wait_log("serving endpoint")
        graph.router("r0").wait_log(says)


def test_decode_workers_that_come_first_are_waited_through_and_what_is_offered_is_the_others(
    open_graph: OpenGraph,
) -> None:
    with open_graph() as graph:
        graph.worker("w0", "--role", "Decode", "--model-name", "m-decode", "--ranks", "1").wait_log("serving endpoint")
        router = graph.router("r0")
        router.wait_log("compute no prompts so far")
        graph.worker("w1", "--role", "Aggregated", "--model-name", "m", "--ranks", "1")
        router.wait_log(r"model m is served by test\.semkv\.generate")
