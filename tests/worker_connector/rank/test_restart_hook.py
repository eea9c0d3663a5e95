"""Whether a failed load restarts its request is asked of what really runs, not of one base class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, llm_args
from worker_connector.assembly import assemble_rank_with
from worker_connector.leader.api_variants import restarts_failed_loads, restarts_failed_parked_loads, runtime_asks

BASE = "class Worker:\n    def start_load_kv(self, stream): ...\n"
BY_ATTRIBUTE = "class Manager:\n    def run(self, worker):\n        return worker.take_failed_load_requests()\n"
BY_NAME = """
class Manager:
    @staticmethod
    def find(worker):
        def look():
            return getattr(worker, "take_failed_load_requests", None)
        return look()
"""
DEFINES_IT = "class MooncakeWorker:\n    def take_failed_load_requests(self):\n        return set()\n"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that loads an engine of somebody else, with the given module beside its executor, and returns its
    worker's base class."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(executor: str) -> type:
        for name, text in (
            ("other_engine/__init__.py", ""),
            ("other_engine/executor/__init__.py", ""),
            ("other_engine/executor/loop.py", executor),
            ("other_engine/executor/connectors/__init__.py", ""),
            ("other_engine/executor/connectors/base.py", BASE),
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        importlib.import_module("other_engine.executor.loop")
        found: type = importlib.import_module("other_engine.executor.connectors.base").Worker
        return found

    yield load
    for name in [name for name in sys.modules if name.startswith("other_engine")]:
        del sys.modules[name]


@pytest.mark.parametrize("executor", [BY_ATTRIBUTE, BY_NAME])
def test_a_runtime_that_asks_without_declaring_is_known(runtime: Any, executor: str) -> None:
    base = runtime(executor)
    assert restarts_failed_loads(base)
    assert not restarts_failed_parked_loads(base), "it does not ask for those"


@pytest.mark.parametrize("executor", ["", DEFINES_IT, "WORDS = 'take_failed_load_requests'\n"])
def test_a_runtime_that_never_asks_is_not_trusted_with_a_failed_load(runtime: Any, executor: str) -> None:
    assert not restarts_failed_loads(runtime(executor))


def test_a_declared_hook_is_enough() -> None:
    assert runtime_asks("take_failed_load_requests", type("Worker", (), {"take_failed_load_requests": None}))


@pytest.mark.parametrize("configured", [True, False, None])
def test_a_setting_overrules_what_was_found(configured: bool | None) -> None:
    rank = assemble_rank_with(
        llm_args(4), settings(MIB, restarts_failed_loads=configured, **OPTIONS), inline=True, env={"RANK": "0"}
    )
    assert rank.restarts_failed is bool(configured)
