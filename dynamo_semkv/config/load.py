"""YAML file and `SEMKV_<SECTION>__<FIELD>` environment -> `Config`. Nothing is guessed and nothing is ignored.

A key that does not exist, at any level, is an error that names its path and the nearest key that does; so is a key that is there twice.
Only `true` and `false` are booleans, as in YAML 1.2: `mode: off` is the word `off`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.contracts.errors import ContractError

ENV_PREFIX = "SEMKV_"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_SALT_KEY_BYTES = 64


class Loaded(NamedTuple):
    config: Config
    hash: str
    """16 hex digits over every value that is in force: two processes with the same hash run the same policy."""
    source: str
    """The file, or `defaults`, and the names of the environment variables that changed it."""
    path: str | None = None
    """The file by itself."""


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
    used = _override(tree, env or {})
    config = build(tree)
    return Loaded(
        config, config_hash(config), source + (f" + {', '.join(used)}" if used else ""), str(path) if path else None
    )


def parse_yaml(raw: bytes | str) -> dict[str, Any]:
    """The file as a plain tree. An empty file is an empty mapping."""
    try:
        tree = yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ContractError("config", str(error), "valid YAML") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ContractError("config", type(tree).__name__, "a mapping of sections")
    return tree


def build(tree: Mapping[str, Any]) -> Config:
    """A plain tree -> Config. Raises ContractError with the full path."""
    config: Config = _build(Config, tree, "")
    return config


def _build(section: type[msgspec.Struct], tree: Mapping[str, Any], path: str) -> Any:
    values: dict[str, Any] = {}
    fields = limits_of(section)
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise ContractError(where, _shown(value), _nearest(str(key), list(fields), path))
        limits = fields[key]
        if issubclass(limits.kind, msgspec.Struct):
            if value is None:
                continue  # a section whose every key is commented out
            if not isinstance(value, Mapping):
                raise ContractError(where, value, limits.allowed())
            values[key] = _build(limits.kind, value, where)
            continue
        if value is None and not limits.optional:
            raise ContractError(where, value, limits.allowed())
        try:
            converted = value if value is None else msgspec.convert(value, limits.kind)
        except msgspec.ValidationError as error:
            raise ContractError(where, value, limits.allowed()) from error
        if not limits.accepts(converted):
            raise ContractError(where, value, limits.allowed())
        values[key] = converted
    return section(**values)


def _nearest(key: str, allowed: list[str], path: str) -> str:
    close = difflib.get_close_matches(key.lower(), allowed, n=1, cutoff=0.5)
    keys = f"the keys of {path or 'the file'}: {', '.join(allowed)}"
    return f"{close[0]} (did you mean that?), or another of {keys}" if close else keys


def _shown(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def _override(tree: dict[str, Any], env: Mapping[str, str]) -> list[str]:
    """Writes `SEMKV_A__B=text` as `a.b` into the tree; returns the names used, sorted."""
    sections = tuple(limits_of(Config))
    used = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX):
            continue
        parts = name[len(ENV_PREFIX) :].lower().split("__")
        if len(parts) == 1:
            _refuse_single_underscore(name, parts[0], sections)
            continue
        _write(tree, parts, env[name], name)
        used.append(name)
    return used


def _refuse_single_underscore(name: str, rest: str, sections: tuple[str, ...]) -> None:
    """`SEMKV_EVIDENCE_DEADLINE_MS` would otherwise be ignored in silence. Other `SEMKV_*` names belong to other programs."""
    section = next((s for s in sections if rest.startswith(s + "_")), None)
    if section is not None:
        field = rest[len(section) + 1 :]
        meant = f"{ENV_PREFIX}{section.upper()}__{field.upper()}"
        raise ContractError(name, "a single underscore after the section", f"two: {meant}")


def _write(tree: dict[str, Any], parts: list[str], text: str, name: str) -> None:
    section: type[msgspec.Struct] = Config
    at = tree
    for depth, part in enumerate(parts):
        fields = limits_of(section)
        here = ".".join(parts[:depth])
        if part not in fields:
            raise ContractError(f"{name} ({'.'.join(parts)})", text, _nearest(part, list(fields), here))
        limits = fields[part]
        last = depth == len(parts) - 1
        if issubclass(limits.kind, msgspec.Struct):
            if last:
                raise ContractError(name, text, f"one field of {part}: {', '.join(limits.kind.__struct_fields__)}")
            if at.get(part) is None:
                at[part] = {}
            at, section = at[part], limits.kind
            if not isinstance(at, dict):
                raise ContractError(".".join(parts[: depth + 1]), at, limits.allowed())
        elif not last:
            raise ContractError(name, text, f"{'.'.join(parts[: depth + 1])} is a value and has no fields")
        else:
            at[part] = _scalar(text, limits.kind, limits.optional)


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
    """blake2b-64 of the canonical JSON of every value, as 16 hex digits."""
    raw = msgspec.json.encode(plain(config), order="sorted")
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
