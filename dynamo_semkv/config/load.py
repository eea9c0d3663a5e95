"""YAML file and `SEMKV_<SECTION>__<FIELD>` environment -> `Config`. Nothing is guessed and nothing is ignored.

A key that does not exist, at any level, is an error that names its path and the nearest key that does; so is a key that is there twice.
Only `true` and `false` are booleans, as in YAML 1.2: `mode: off` is the word `off`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from dynamo_semkv.config.environment import nearest, override
from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.contracts.errors import ContractError, ContractErrors, each

MAX_CONFIG_BYTES = 1024 * 1024
MAX_SALT_KEY_BYTES = 64


class Loaded(NamedTuple):
    config: Config
    hash: str
    """16 hex digits over every value that is in force, but for the page's port: two processes with the same hash run the same
    policy, also two routers of one machine, whose pages need two ports."""
    source: str
    """The file, or `defaults`, and the names of the environment variables that changed it."""
    path: str | None = None
    """The file by itself."""
    warnings: tuple[str, ...] = ()
    """What is no error and not meant either: `SEMKV_*` variables that mean nothing."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the booleans and floats (`1e9`) of YAML 1.2, and without duplicate keys."""

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
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_config(path: str | Path | None = None, env: Mapping[str, str] | None = None) -> Loaded:
    """Reads the file (None: defaults only) and applies the overrides of `env` (None: none).

    Raises ContractError that names the path of the key, the value and what is allowed; OSError when the file cannot be read.
    """
    tree: dict[str, Any] = {}
    source = "defaults"
    if path is not None:
        raw = Path(path).read_bytes()
        if len(raw) > MAX_CONFIG_BYTES:
            raise ContractError("config.bytes", len(raw), f"at most {MAX_CONFIG_BYTES}")
        tree, source = parse_yaml(raw), str(path)
    said = override(tree, env or {}, _scalar)
    errors = list(said.errors)
    config: Config | None = None
    try:
        config = build(tree)
    except ContractError as error:
        errors += [_blamed(one, said.origins) for one in each(error)]
    if errors or config is None:
        raise ContractErrors.of(errors)
    source += f" + {', '.join(said.used)}" if said.used else ""
    return Loaded(config, config_hash(config), source, str(path) if path else None, said.unknown)


def _blamed(error: ContractError, origins: Mapping[str, str]) -> ContractError:
    """Names the variable too, where it was one that set the field."""
    name = origins.get(error.field)
    return error if name is None else ContractError(f"{name} ({error.field})", error.value, error.allowed)


def parse_yaml(raw: bytes | str) -> dict[str, Any]:
    """The file as a plain tree. An empty file is an empty mapping."""
    try:
        tree = yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _no_yaml(error, raw) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ContractError("config", type(tree).__name__, "a mapping of sections")
    return tree


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


def build(tree: Mapping[str, Any]) -> Config:
    """A plain tree -> Config. Raises ContractError with the full path; ContractErrors when there is more than one."""
    errors: list[ContractError] = []
    config: Config | None = _build(Config, tree, "", errors)
    if errors or config is None:
        raise ContractErrors.of(errors)
    return config


def _build(section: type[msgspec.Struct], tree: Mapping[str, Any], path: str, errors: list[ContractError]) -> Any:
    """None when something in it is wrong, which is then among the errors: all of it, not the first alone."""
    values: dict[str, Any] = {}
    fields = limits_of(section)
    before = len(errors)
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            errors.append(ContractError(where, _shown(value), nearest(str(key), list(fields), path)))
            continue
        limits = fields[key]
        if issubclass(limits.kind, msgspec.Struct):
            if value is None:
                continue  # a section whose every key is commented out
            if isinstance(value, Mapping):
                values[key] = _build(limits.kind, value, where, errors)
            else:
                errors.append(ContractError(where, value, limits.allowed()))
            continue
        try:
            converted = value if value is None else msgspec.convert(value, limits.kind)
        except msgspec.ValidationError:
            errors.append(ContractError(where, value, limits.allowed()))
            continue
        if limits.accepts(converted):
            values[key] = converted
        else:
            errors.append(ContractError(where, value, limits.allowed()))
    if len(errors) > before:
        return None
    try:
        return section(**values)
    except ContractError as error:
        errors.extend(each(error))
        return None


def _shown(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def _scalar(text: str, kind: type, optional: bool) -> Any:
    if optional and text.strip() in ("", "null"):
        return None
    if kind in (bool, int, float):
        try:
            return yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            return text  # refused by the type check, with its path
    return text


def config_hash(config: Config) -> str:
    """blake2b-64 of the canonical JSON of every value but the page's port, as 16 hex digits. Beside another router the port differs, and
    what is decided does not."""
    values = dict(plain(config))
    values["dashboard"] = {key: value for key, value in values["dashboard"].items() if key != "port"}
    raw = msgspec.json.encode(values, order="sorted")
    return hashlib.blake2b(raw, digest_size=8, person=b"semkv-config").hexdigest()


def read_salt_key(path: str | Path | None, default: bytes) -> bytes:
    """The key of `security.salt_key_file`, or `default` where none is set. One trailing line end is not part of the key."""
    if path is None:
        return default
    raw = Path(path).read_bytes()
    key = raw[:-1] if raw.endswith(b"\n") else raw
    if not 1 <= len(key) <= MAX_SALT_KEY_BYTES:
        raise ContractError(
            "security.salt_key_file", len(key), f"a file with 1 to {MAX_SALT_KEY_BYTES} bytes", secret=True
        )
    return key
