"""Real routers and workers of a kept release beside those of this checkout, in one graph with frontend and broker.

`tests/contracts/test_mixed_versions.py` holds the messages against each other; here nobody is scripted.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from graphs.local.graph import LocalGraph
from graphs.local.settings import LOW_GATE, GraphSettings
from tests.contracts.test_mixed_versions import each_release
from tests.graphs.traffic import ask, forget_device, routes, send, snapshot, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]

OLDER, NEWER = "router-0", "router-1"
PROMPTS = 6
RUN_FROM = """
import runpy, sys
place = sys.argv[1]
del sys.argv[:2]
sys.path[:] = [place, *(path for path in sys.path if path not in ("", "."))]
import dynamo_semkv, worker_connector
for package in (dynamo_semkv, worker_connector):
    assert package.__file__.startswith(place), package.__file__
print("packages of", place, flush=True)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""`python -m MODULE` reads the packages of the folder that it is started in; this one those of PLACE, or none."""


class Mixed(LocalGraph):
    """Of two routers the first is of the kept release; the worker too, if `older` names it."""

    def __init__(self, place: Path, older: frozenset[str], run_dir: Path, model_dir: Path) -> None:
        settings = GraphSettings(
            model="tiny",
            threads=1,
            workers=1,
            data_parallel_size=1,
            routers=2,
            overrides={**LOW_GATE, "connector": {"announce_interval_seconds": 1.0}},
        )
        super().__init__(settings, run_dir=run_dir, model_dir=model_dir)
        self.place = place
        self.older = older

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        (python, flag, *arguments), env = super()._command(name)
        if name in self.older:
            assert flag == "-m"
            return [python, "-c", RUN_FROM, str(self.place), *arguments], env
        if name != "frontend":
            env["SEMKV_BUS__PACK_RECORDS"] = "false"  # as docs/releasing.md says for such a time
        return [python, flag, *arguments], env


@each_release
@pytest.mark.parametrize("worker", ["newer worker", "older worker"])
def test_routers_of_both_releases_serve_a_worker_of_either_and_agree(
    kept: Path, worker: str, tmp_path: Path, model_dir: Path
) -> None:
    place = tmp_path / "release"
    with zipfile.ZipFile(kept) as packages:
        packages.extractall(place)
    older = frozenset({OLDER, *(("worker-0",) if worker == "older worker" else ())})
    with Mixed(place, older, tmp_path / "run", model_dir) as graph:
        assert {name for name in graph.processes if f"packages of {place}\n" in graph.log_text(name)} == older
        confirmed: dict[str, int] = {}
        """By the router that opened the route, as each names itself."""

        def both_have_materialized() -> bool:
            """Whichever router the frontend picks: prompts, then again from host memory alone."""
            for seed in range(PROMPTS):
                answer = send(graph, ask(seed, max_tokens=4))
                assert answer.ok, answer.error
                older_says, newer_says = (closed(graph, name, answer.request_id) for name in (OLDER, NEWER))
                assert older_says == newer_says, "one outcome, whoever tells of it"
                router, outcome, tokens = newer_says
                assert (outcome == "materialized_exact") == (tokens > 0)
                confirmed[router] = confirmed.get(router, 0) + tokens
            forget_device(graph)
            return len([tokens for tokens in confirmed.values() if tokens]) == 2

        wait_until("routes of both that materialized", both_have_materialized, 240.0, lambda: str(confirmed))
        for name in (OLDER, NEWER):
            knows = snapshot(graph, name)
            assert knows["catalog"]["donors"] >= PROMPTS
            assert not [stream for stream in knows["streams"] if stream["malformed"] or stream["unsupported_version"]]
        assert graph.trouble() == []


def closed(graph: LocalGraph, router: str, request_id: str | None) -> tuple[str, str, int]:
    """(who opened it, outcome, confirmed tokens) of a request's only route, when this router has closed it."""
    found = wait_until(f"{router} to close {request_id}", lambda: routes(graph, router, request_id))
    assert len(found) == 1
    return found[0]["opened"]["router"], found[0]["outcome"], found[0]["report"]["confirmed"]
