"""Which module may import which: the directions of docs/architecture.md as data, and a checker over syntax trees.

Imports inside functions and under TYPE_CHECKING count too: a cycle hidden in a function is still a cycle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

OURS = ("dynamo_semkv", "worker_connector", "graphs", "tests")

# A layer may import itself and the layers before it.
LAYERS = (
    "contracts",
    "config",
    "telemetry",
    "bus",
    "evidence",
    "scoring",
    "advice",
    "outcome",
    "observe",
    "dashboard",
    "router",
    "bench",
    "cli",
)
# Fakes for users: may import what lies below the router; tests and the bench import them.
TESTING = "testing"
TESTING_BELOW = "router"
TESTING_USERS = ("bench",)

# The same for worker_connector. Modules in its root count as a layer by their name: the first ones are leaves that all
# may import, the last ones are what an engine names, and the wiring.
CONNECTOR_LAYERS = (
    "errors",
    "timings",
    "background",
    "restatement",
    "ledger",
    "engine_api",
    "memory",
    "disk",
    "link",
    "rank",
    "requests",
    "donors",
    "leader",
    "fetch",
    "assembly",
    "scheduler",
    "worker",
    "connector",
    "reference_engine",
    "bench",
)
# And for the reference engine within it.
ENGINE_LAYERS = ("models", "timing", "engine", "dynamo_worker", "__main__")

# What worker_connector may see of dynamo_semkv. Telemetry: names of spans, metrics and log fields are the same on both
# sides.
SHARED_WITH_CONNECTOR = ("contracts", "bus", "config", "telemetry")

# Foreign packages that only the named modules may import (of those under OURS, tests excepted).
EDGES = {
    # bench.peers measures Dynamo's own index; bench.router.bare is the floor of any router in Python.
    "dynamo": (
        "dynamo_semkv.router.runtime*",
        "dynamo_semkv.bench.peers",
        "dynamo_semkv.bench.router.bare",
        "worker_connector.reference_engine.dynamo_worker.worker*",
        "graphs.*",
    ),
    "tensorrt_llm": ("worker_connector.engine_api.engine",),
    "nats": ("dynamo_semkv.bus.*",),
    "opentelemetry": ("dynamo_semkv.telemetry.tracing",),
    "aiohttp": (
        "dynamo_semkv.dashboard.*",
        "dynamo_semkv.router.*",
        "dynamo_semkv.bench.*",
        "dynamo_semkv.cli*",
        "graphs.*",
    ),
    "torch": ("worker_connector.*", "graphs.*"),
}


@dataclass(frozen=True, order=True)
class Violation:
    importer: str
    line: int
    imported: str
    rule: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}: {self.rule}"


def module_name(path: Path, root: Path) -> str:
    """`pkg/sub/__init__.py` is `pkg.sub.__init__`, so that what follows can tell a package from its parent's module."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def imports(source: str, importer: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved. `from a import b` gives `a.b`: b may be a module."""
    package = importer.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def layer(module: str) -> str | None:
    """The layer of a module of dynamo_semkv; None for the package itself, which holds nothing but its version."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in ("__init__", "__version__"):
        return None
    return "cli" if parts[1] == "__main__" else parts[1]


def direction_fault(importer: str, imported: str) -> str | None:
    """Why our module `importer` may not import our module `imported`; None if it may."""
    source, target = importer.split(".")[0], imported.split(".")[0]
    if target == "tests":
        return "packages do not import tests"
    if source == "graphs":
        return None
    if source == "worker_connector":
        if target == "graphs":
            return "worker_connector does not know the graphs"
        if target == "dynamo_semkv" and layer(imported) not in (None, *SHARED_WITH_CONNECTOR):
            return f"worker_connector sees only {', '.join(SHARED_WITH_CONNECTOR)} of dynamo_semkv"
        return room_fault(importer, imported)
    if target != "dynamo_semkv":
        return f"dynamo_semkv does not know {target}"
    return layer_fault(layer(importer), layer(imported))


def room_fault(importer: str, imported: str) -> str | None:
    """Why our module `importer` may not import our module `imported`, by the rooms of worker_connector; None if it
    may."""
    source, target = importer.split("."), imported.split(".")
    if target[0] != "worker_connector" or len(target) == 1:
        return None
    fault = order_fault(CONNECTOR_LAYERS, source[1], target[1])
    if fault is None and source[1] == target[1] == "reference_engine" and len(source) > 2 and len(target) > 2:
        # The package itself hands out the public names of its rooms.
        return None if source[2] == "__init__" else order_fault(ENGINE_LAYERS, source[2], target[2])
    return fault


def order_fault(layers: tuple[str, ...], source: str, target: str) -> str | None:
    if source == target:
        return None
    for name in (source, target):
        if name not in layers:
            return f"`{name}` is in no layer: give it a place in the order"
    return f"{target} lies above {source}" if layers.index(target) > layers.index(source) else None


def layer_fault(source: str | None, target: str | None) -> str | None:
    if target is None or source == target:
        return None
    if source is None:
        return "the package itself imports nothing of ours"
    for name in (source, target):
        if name not in (*LAYERS, TESTING):
            return f"`{name}` is in no layer: give it a place in LAYERS"
    if target == TESTING:
        return None if source in TESTING_USERS else f"{TESTING} is for tests and the bench"
    if source == TESTING:
        below = LAYERS[: LAYERS.index(TESTING_BELOW)]
        return None if target in below else f"{TESTING} may import what lies below {TESTING_BELOW}"
    if LAYERS.index(target) > LAYERS.index(source):
        return f"{target} lies above {source}"
    return None


def edge_fault(importer: str, imported: str) -> str | None:
    """Why `importer` may not import the foreign package that `imported` belongs to; None if it may."""
    package = imported.split(".")[0]
    allowed = EDGES.get(package)
    if allowed is None or any(fnmatchcase(importer, pattern) for pattern in allowed):
        return None
    return f"only {', '.join(allowed)} may import {package}"


def violations(source: str, importer: str) -> list[Violation]:
    found = []
    for line, imported in imports(source, importer):
        ours = imported.split(".")[0] in OURS
        rule = direction_fault(importer, imported) if ours else edge_fault(importer, imported)
        if rule:
            found.append(Violation(importer, line, imported, rule))
    return sorted(found)
