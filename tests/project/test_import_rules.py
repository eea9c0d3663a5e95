"""The import directions hold in the packages, and the checker sees each kind of breach."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.import_rules import module_name, violations

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dynamo_semkv", "worker_connector", "graphs")


def test_packages_obey_the_directions() -> None:
    checked = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in checked} == set(PACKAGES)
    found = [v for path in checked for v in violations(path.read_text(), module_name(path, ROOT))]
    assert not found, "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("importer", "source", "rule"),
    [
        ("dynamo_semkv.contracts.keys", "import dynamo_semkv.config", "config lies above contracts"),
        ("dynamo_semkv.scoring.choose", "from ..router import pipeline", "router lies above scoring"),
        ("dynamo_semkv.scoring.choose", "from dynamo_semkv import advice", "advice lies above scoring"),
        (
            "dynamo_semkv.scoring.choose",
            "def f():\n    from dynamo_semkv.outcome.route_tracker import Book",
            "outcome lies above",
        ),
        ("dynamo_semkv.bench.report", "from dynamo_semkv.cli import main", "cli lies above bench"),
        ("dynamo_semkv.router.service", "from dynamo_semkv.testing import clock", "for tests and the bench"),
        ("dynamo_semkv.testing.clock", "from dynamo_semkv.router.service import x", "below router"),
        ("dynamo_semkv.router.service", "from dynamo_semkv.helpers import x", "in no layer"),
        ("dynamo_semkv.helpers", "from dynamo_semkv.contracts import codec", "in no layer"),
        ("dynamo_semkv.__init__", "from dynamo_semkv.contracts import codec", "imports nothing of ours"),
        ("dynamo_semkv.evidence.catalog", "import worker_connector.memory.slab", "does not know worker_connector"),
        ("dynamo_semkv.cli", "import graphs.local", "does not know graphs"),
        ("dynamo_semkv.router.service", "from tests.router import fakes", "do not import tests"),
        ("worker_connector.ledger.ledger", "from dynamo_semkv.evidence.catalog import Catalog", "sees only contracts"),
        ("worker_connector.ledger.ledger", "from dynamo_semkv import router", "sees only contracts"),
        ("worker_connector.disk.tier", "from worker_connector.leader.leader import Leader", "leader lies above disk"),
        ("worker_connector.ledger.plan", "import worker_connector.helpers", "in no layer"),
        (
            "worker_connector.fetch.fetcher",
            "from worker_connector.connector import Leader",
            "connector lies above fetch",
        ),
        ("worker_connector.rank.rank", "import worker_connector.reference_engine", "reference_engine lies above rank"),
        (
            "worker_connector.reference_engine.models.model",
            "from worker_connector.reference_engine.engine.config import EngineConfig",
            "engine lies above models",
        ),
        ("worker_connector.ledger.ledger", "import graphs.local.run", "does not know the graphs"),
        ("dynamo_semkv.router.service", "from dynamo.llm import KvRouter", "may import dynamo"),
        ("worker_connector.reference_engine.engine.engine", "import dynamo.runtime", "may import dynamo"),
        ("worker_connector.scheduler", "import tensorrt_llm._torch", "may import tensorrt_llm"),
        ("worker_connector.scheduler", "importlib.import_module('tensorrt_llm')", "may import tensorrt_llm"),
        ("dynamo_semkv.outcome.intake", "import nats", "may import nats"),
        ("dynamo_semkv.advice.gate", "if TYPE_CHECKING:\n    import torch", "may import torch"),
        ("dynamo_semkv.evidence.catalog", "import aiohttp.web", "may import aiohttp"),
    ],
)
def test_a_breach_is_seen(importer: str, source: str, rule: str) -> None:
    (found,) = violations(source, importer)
    assert rule in found.rule


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        (
            "dynamo_semkv.scoring.choose",
            "from . import stages\nfrom ..evidence.catalog import Catalog\nimport numpy, msgspec",
        ),
        ("dynamo_semkv.cli", "from dynamo_semkv import __version__\nfrom dynamo_semkv.bench import report"),
        ("dynamo_semkv.__main__", "from dynamo_semkv.cli import main"),
        ("dynamo_semkv.router.runtime_stream", "from dynamo.llm import KvRouter"),
        ("dynamo_semkv.testing.tape", "from dynamo_semkv.dashboard.page import x"),
        ("worker_connector.reference_engine.dynamo_worker.worker", "import dynamo.runtime, torch"),
        (
            "worker_connector.requests.report",
            "from dynamo_semkv.bus.publisher import Publisher\nfrom worker_connector.ledger.plan import Plan",
        ),
        ("graphs.local.run", "import dynamo_semkv.router.service, worker_connector.memory.slab, dynamo.runtime"),
    ],
)
def test_what_is_allowed_passes(importer: str, source: str) -> None:
    assert violations(source, importer) == []
