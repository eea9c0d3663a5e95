"""The repository as a whole: small files, no machine's paths, no registry hosts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
MAX_FUNCTION_LINES = 50
PACKAGES = ("dynamo_semkv", "worker_connector", "graphs", "scripts")
SOURCE_SUFFIXES = {".py", ".js", ".css", ".html", ".sh"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".txt", ".in", ".yaml", ".yml", ".json", ".svg", ".cfg"}
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
}
SKIPPED_FOLDERS |= {".run", ".cache"}

# Spelled in pieces, or this file would be found. The look-behind leaves URL paths and module paths alone.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|tmp/v\d?)(?:/|\b(?![\w.]))")
REGISTRY_HOST = re.compile(
    "|".join(
        re.escape(f"{host}.{domain}")
        for host, domain in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("deb.debian", "org"),
            ("npmjs", "org"),
            ("npmjs", "com"),
            ("download.pytorch", "org"),
        )
    )
)


def files(folder: Path = ROOT) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name not in SKIPPED_FOLDERS:
                yield from files(path)
        elif path.suffix in TEXT_SUFFIXES or path.name in {"Makefile", "run", ".gitignore"}:
            yield path


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_walk_sees_the_repository() -> None:
    seen = {str(path.relative_to(ROOT)) for path in files()}
    assert {"pyproject.toml", "Makefile", ".ci/run", "README.md", "dynamo_semkv/__init__.py"} <= seen


def test_files_are_small() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in files()
        if path.suffix in SOURCE_SUFFIXES and (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}: {node.name}": length
        for package in PACKAGES
        for path in files(ROOT / package)
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_no_machine_paths() -> None:
    assert not (found := lines_matching(MACHINE_PATH)), "\n" + "\n".join(found)


def test_no_registry_hosts() -> None:
    assert not (found := lines_matching(REGISTRY_HOST)), "\n" + "\n".join(found)


@pytest.mark.parametrize("template", ["/{work}/main/x.py", "see /{root}/.cache", "'/{tmp}/v/venv'", "/{work}"])
def test_a_machine_path_is_seen(template: str) -> None:
    assert MACHINE_PATH.search(template.format(work="work", root="root", tmp="tmp"))


@pytest.mark.parametrize(
    "text", ["a/{work}/b", "https://host/{root}/x", "/{work}ers", "/{tmp}/venv", "v1/{root}/list", "/{root}ed"]
)
def test_other_paths_pass(text: str) -> None:
    assert not MACHINE_PATH.search(text.format(work="work", root="root", tmp="tmp"))
