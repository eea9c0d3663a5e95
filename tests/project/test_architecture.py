"""docs/architecture.md against the tree: each package has its line, and each module is named there or in its package's
docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.project.import_rules import CONNECTOR_LAYERS, ENGINE_LAYERS, LAYERS, TESTING

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = sorted(
    folder.parent
    for package in ("dynamo_semkv", "worker_connector")
    for folder in (ROOT / package).rglob("__init__.py")
    if folder.parent.name != "static"
)


def named(package: Path) -> set[str]:
    """The `module.py` and `group*.py` that the page's line about a package, and the package's docstring, name."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| `{package.name}/`")]
    return set(re.findall(r"`([\w*]+\.py)`", "\n".join([docstring, *lines])))


def is_named(module: str, names: set[str]) -> bool:
    return any(re.fullmatch(name.replace(".", r"\.").replace("*", r"\w*"), module) for name in names)


def test_each_package_stands_in_the_order_and_on_the_page() -> None:
    ordered = {*LAYERS, TESTING, *CONNECTOR_LAYERS}
    for package in PACKAGES:
        below = package.relative_to(ROOT).parts[1:]
        if len(below) == 1:
            assert below[0] in ordered, f"{package} has no place in tests/project/import_rules.py"
            assert f"`{below[0]}/`" in PAGE, f"docs/architecture.md says nothing of {package.name}/"
        elif below[:1] == ("reference_engine",):
            assert below[1] in ENGINE_LAYERS
            assert f"`{below[1]}/`" in PAGE


ROOMS = [
    package for package in PACKAGES if package.parent.name in ("dynamo_semkv", "worker_connector", "reference_engine")
]


@pytest.mark.parametrize("package", ROOMS, ids=lambda package: f"{package.parent.name}-{package.name}")
def test_each_module_is_named(package: Path) -> None:
    names = named(package)
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert sorted(module for module in modules if not is_named(module, names)) == []
    gone = {name for name in names if "*" not in name and name not in modules and not list(package.rglob(name))}
    assert sorted(gone) == [], "named, and not there"


def test_where_to_start_names_files_that_are_there() -> None:
    table = PAGE[PAGE.index("## Where to start") : PAGE.index("## Identity")]
    places = [ROOT / "dynamo_semkv", ROOT / "worker_connector", ROOT / "dynamo_semkv" / "dashboard", ROOT / "tests"]
    names = re.findall(r"`([\w/]+\.(?:py|js|html))`", table)
    names = [f"contracts/{name}" if name == "donor_events.py" else name for name in names]
    assert len(names) > 25
    assert [name for name in names if not any((place / name).is_file() for place in places)] == []
