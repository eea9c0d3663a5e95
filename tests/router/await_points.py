"""The places at which code can be cancelled: every `await` and `async for` of a module, and where a running task is
suspended right now."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Point(NamedTuple):
    module: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.first} {self.text}"


def points(module: ModuleType, inside: str | None = None) -> list[Point]:
    """Of a module, or of one class or function of it."""
    source = Path(str(module.__file__)).read_text()
    tree: ast.AST = ast.parse(source)
    if inside is not None:
        tree = next(node for node in ast.walk(tree) if getattr(node, "name", None) == inside)
    name = module.__name__.rsplit(".", 1)[-1]
    found = []
    for node in ast.walk(tree):
        where: ast.expr | None = None
        if isinstance(node, ast.Await):
            where = node
        elif isinstance(node, (ast.AsyncFor, ast.comprehension)) and (isinstance(node, ast.AsyncFor) or node.is_async):
            where = node.iter
        if where is not None:
            text = (ast.get_source_segment(source, where) or "").split("\n")[0]
            first = node.lineno if isinstance(node, ast.AsyncFor) else where.lineno
            found.append(Point(name, first, where.end_lineno or where.lineno, text))
    return sorted(found)


class Suspended:
    """Follows the async generators that begin while it is on, which nothing else leads to from a task."""

    def __init__(self) -> None:
        self._generators: list[Any] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside a running loop, whose own hooks go on being called."""
        hooks = sys.get_asyncgen_hooks()

        def begun(generator: Any) -> None:
            self._generators.append(generator)
            if hooks.firstiter is not None:
                hooks.firstiter(generator)

        sys.set_asyncgen_hooks(firstiter=begun)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(firstiter=hooks.firstiter)
            self._generators.clear()

    def lines(self) -> set[tuple[str, int]]:
        """(module, line) of every frame that waits for something."""
        found: set[tuple[str, int]] = set()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                found |= _chain(task.get_coro())
        for generator in self._generators:
            if generator.ag_running:
                found |= _chain(generator)
        return found


def _chain(at: Any) -> set[tuple[str, int]]:
    found = set()
    while at is not None:
        frame = getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None)
        if frame is not None:
            found.add((Path(frame.f_code.co_filename).stem, frame.f_lineno))
        at = getattr(at, "cr_await", None) or getattr(at, "ag_await", None)
    return found
