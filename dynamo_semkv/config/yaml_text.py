"""YAML text -> a plain tree, or a ContractError with the line. Bounded: no text makes it recurse, wait or build without
end.

parse_yaml(raw) -> dict      a whole file
parse_scalar(text) -> Any    one value of a variable
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from dynamo_semkv.contracts.errors import ContractError

MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_SCALAR = 1_024
"""Characters of what is no text."""

_FORMS = {
    "null": (re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    "int": (re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*|0x[0-9a-fA-F]+)"), list("-+0123456789")),
    "float": (
        re.compile(
            r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        list("-+.0123456789"),
    ),
}
"""What is no text, with its first characters. All of it means the same in YAML 1.1 and 1.2. So `010` (8 in one and 10
in the other), `1:30` (90 or a text), `0o17`, `0b1`, `yes` and dates are texts: used as written where text is allowed,
and refused elsewhere."""


class _Loader(yaml.SafeLoader):
    """SafeLoader without what versions of YAML read in different ways, without duplicate keys, and with bounds on what
    it builds."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        line = f"config line {self.peek_event().start_mark.line + 1}"  # type: ignore[no-untyped-call]
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise ContractError(line, f"{self._depth} levels", f"at most {MAX_DEPTH} levels of nesting")
        if self._nodes > MAX_NODES:
            raise ContractError(line, f"{self._nodes} keys and values", f"at most {MAX_NODES}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        line = f"config line {node.start_mark.line + 1}"
        kind = node.tag.rpartition(":")[2]
        if kind != "str" and len(node.value) > MAX_SCALAR:
            raise ContractError(line, node.value, f"at most {MAX_SCALAR} characters of {kind}")
        if kind in _FORMS and not _FORMS[kind][0].fullmatch(node.value):  # of `!!int 010`
            raise ContractError(line, node.value, f"a valid {kind}, or quotes around a text")
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()
        except yaml.YAMLError:
            raise
        except Exception as error:  # PyYAML lets through whatever Python's conversions raise: told, with its line
            reason = str(error).partition(";")[0] or type(error).__name__
            raise ContractError(line, node.value, f"a valid {kind}, or quotes around a text; here: {reason}") from error
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = f"config line {key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise ContractError(line, key, "a word as key")
            if key in seen:
                raise ContractError(line, key, "each key once")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [found for found in resolvers if found[0] == "tag:yaml.org,2002:merge"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_form, _first) in _FORMS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_form.pattern})\Z"), _first)


def parse_yaml(raw: bytes | str) -> dict[str, Any]:
    """The file as a plain tree. An empty file is an empty mapping."""
    tree = _parsed(raw)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ContractError("config", type(tree).__name__, "a mapping of sections")
    return tree


def parse_scalar(text: str) -> Any:
    """One value, as the file would have it. Raises ContractError."""
    return _parsed(text)


def _parsed(raw: bytes | str) -> Any:
    try:
        return yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _no_yaml(error, raw) from error
    except ContractError:
        raise
    except (
        Exception
    ) as error:  # whatever else a file makes PyYAML raise, it is the file that is refused: told, not a traceback
        raise ContractError("config", f"{type(error).__name__}: {error}", "valid YAML in UTF-8") from error


def _no_yaml(error: yaml.YAMLError, raw: bytes | str) -> ContractError:
    """Where it is, the line itself, and what the parser makes of it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        reason = getattr(error, "reason", None) or str(error).partition("\n")[0]
        return ContractError("config", reason, "valid YAML in UTF-8")
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    lines = text.splitlines()
    line = lines[mark.line].strip() if mark.line < len(lines) else "the end of the file"
    context = getattr(error, "context", None)
    problem = getattr(error, "problem", None) or "not understood"
    said = f"{problem} ({context})" if context else problem
    return ContractError(f"config line {mark.line + 1}, column {mark.column + 1}", line, f"valid YAML; here: {said}")


__all__ = ["MAX_DEPTH", "MAX_NODES", "MAX_SCALAR", "parse_scalar", "parse_yaml"]
