"""Reads what a module says of its own classes from its source: the docstring of each class, and the text under each
field."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import NamedTuple


class FieldDoc(NamedTuple):
    """One field of a class."""

    annotation: str
    """As it is written in the source."""
    text: str
    """The string under the field, on one line; empty where there is none."""


class ClassDoc(NamedTuple):
    """One class: its docstring, fields and constants by name."""

    text: str
    fields: dict[str, FieldDoc]
    constants: dict[str, str]
    """Members of an enumeration, and what stands under them."""


def one_line(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(text.split())


@cache
def _classes(source: str) -> dict[str, ClassDoc]:
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _class(node)
    return found


def _class(node: ast.ClassDef) -> ClassDoc:
    fields: dict[str, FieldDoc] = {}
    constants: dict[str, str] = {}
    for at, part in enumerate(node.body):
        after = node.body[at + 1] if at + 1 < len(node.body) else None
        below = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        text = one_line(below) if isinstance(below, str) else ""
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            fields[part.target.id] = FieldDoc(ast.unparse(part.annotation), text)
        elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
            constants[part.targets[0].id] = text
    return ClassDoc(ast.get_docstring(node) or "", fields, constants)


def class_doc(kind: type) -> ClassDoc:
    """What the source of a class says; base classes are not looked at."""
    module = inspect.getmodule(kind)
    assert module is not None
    return _classes(inspect.getsource(module))[kind.__name__]


def cell(text: str) -> str:
    """The text made safe inside a table of Markdown."""
    return one_line(text).replace("|", "\\|")
