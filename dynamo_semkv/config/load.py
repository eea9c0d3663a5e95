"""YAML file and `SEMKV_<SECTION>__<FIELD>` environment -> `Config`. Nothing is guessed and nothing is ignored.

A key that does not exist, at any level, is an error that names its path and the nearest key that does; so is a key that
is there twice. Only `true` and `false` are booleans, as in YAML 1.2: `mode: off` is the word `off`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_semkv.config.environment import nearest, override
from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.config.sizes import misfits
from dynamo_semkv.config.yaml_text import parse_scalar, parse_yaml
from dynamo_semkv.contracts.errors import ContractError, ContractErrors, each

MAX_CONFIG_BYTES = 1024 * 1024
MAX_SALT_KEY_BYTES = 64
MIN_FETCH_SECRET_BYTES = 16
MAX_FETCH_SECRET_BYTES = 1024
MAX_ERRORS = 20
"""That are told one by one; of more, how many there are."""
_MAX_WORD = 120


class Loaded(NamedTuple):
    """A configuration as it was read, and where it came from."""

    config: Config
    hash: str
    """16 hex digits over every value that is in force, but for the page's port: two processes with the same hash run
    the same policy, also two routers of one machine, whose pages need two ports."""
    source: str
    """The file, or `defaults`, and the names of the environment variables that changed it."""
    path: str | None = None
    """The file by itself."""
    warnings: tuple[str, ...] = ()
    """What is no error and not meant either: `SEMKV_*` variables that mean nothing, numbers that do not fit
    together."""
    overrides: tuple[str, ...] = ()
    """Names of the environment variables that set a value."""

    @property
    def told(self) -> str:
        """Which configuration this is, for the line that a process writes at its start."""
        file = f"file {os.path.abspath(self.path)}" if self.path is not None else "no file"
        if self.overrides:
            return f"configuration {self.hash}: {file}, changed by {', '.join(self.overrides)}"
        rest = "" if self.path is not None else " and no variable, so every value is its default"
        return f"configuration {self.hash}: {file}{rest}"


def load_config(path: str | Path | None = None, env: Mapping[str, str] | None = None) -> Loaded:
    """Reads the file (None: defaults only) and applies the overrides of `env` (None: none).

    Raises ContractError that names the path of the key, the value and what is allowed; OSError when the file cannot be
    read.
    """
    tree: dict[str, Any] = {}
    source = "defaults"
    if path is not None:
        if not str(path):
            raise ContractError("config", "", "the path of a file; for none, say nothing")
        tree, source = parse_yaml(_read(path)), str(path)
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
    warnings = (*said.unknown, *misfits(config))
    return Loaded(config, config_hash(config), source, str(path) if path else None, warnings, said.used)


def _read(path: str | Path) -> bytes:
    """Never waits and never reads without end: a pipe or a device is refused, and opened so that a pipe without a
    writer does not block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ContractError("config", str(path), "a regular file")
        raw = file.read(MAX_CONFIG_BYTES + 1)
    if len(raw) > MAX_CONFIG_BYTES:
        raise ContractError("config.bytes", max(len(raw), found.st_size), f"at most {MAX_CONFIG_BYTES}")
    return raw


def _refusal(errors: list[ContractError]) -> ContractError:
    told = errors[:MAX_ERRORS]
    if len(errors) > MAX_ERRORS:
        told.append(ContractError("config", f"{len(errors)} errors", f"none; the first {MAX_ERRORS} are listed"))
    return ContractErrors.of(told)


def _blamed(error: ContractError, origins: Mapping[str, str]) -> ContractError:
    """Names the variable too, where it was one that set the field."""
    name = origins.get(error.field)
    return error if name is None else ContractError(f"{name} ({error.field})", error.value, error.allowed)


def build(tree: Mapping[str, Any]) -> Config:
    """A plain tree -> Config. Raises ContractError with the full path; ContractErrors when there is more than one."""
    errors: list[ContractError] = []
    config: Config | None = _build(Config, tree, "", errors)
    if errors or config is None:
        raise _refusal(errors)
    return config


def _build(section: type[msgspec.Struct], tree: Mapping[str, Any], path: str, errors: list[ContractError]) -> Any:
    """None when something in it is wrong, which is then among the errors: all of it, not the first alone."""
    values: dict[str, Any] = {}
    fields = limits_of(section)
    before = len(errors)
    for key, value in tree.items():
        word = str(key) if len(str(key)) <= _MAX_WORD else f"{str(key)[: _MAX_WORD - 3]}..."
        where = f"{path}.{word}" if path else word
        if key not in fields:
            # Looking for what was meant takes a while, and nobody reads the thousandth.
            allowed = nearest(word, list(fields), path) if len(errors) < MAX_ERRORS else "a key that exists"
            errors.append(ContractError(where, _shown(value), allowed))
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
        except (msgspec.ValidationError, OverflowError, ValueError):  # the last two: of integers beyond any float
            quotes = (
                "; what looks like another kind wants quotes"
                if limits.kind is str and isinstance(value, (bool, int, float))
                else ""
            )
            errors.append(ContractError(where, value, limits.allowed() + quotes))
            continue
        fault = limits.fault(where, converted)
        if fault is None:
            values[key] = converted
        else:
            errors.append(fault)
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
    if optional and text in ("", "null"):
        return None
    if kind in (bool, int, float):
        try:
            return parse_scalar(text)
        except ContractError:
            return text  # refused by the type check, with its path
    return text


def config_hash(config: Config) -> str:
    """blake2b-64 of the canonical JSON of every value but the page's port, as 16 hex digits. Beside another router the
    port differs, and what is decided does not."""
    values = dict(plain(config))
    values["dashboard"] = {key: value for key, value in values["dashboard"].items() if key != "port"}
    raw = msgspec.json.encode(values, order="sorted")
    return hashlib.blake2b(raw, digest_size=8, person=b"semkv-config").hexdigest()


def read_salt_key(path: str | Path | None, default: bytes) -> bytes:
    """The key of `security.salt_key_file`, or `default` where none is set. One trailing line end is not part of the
    key."""
    if path is None:
        return default
    return _read_secret(path, "security.salt_key_file", 1, MAX_SALT_KEY_BYTES, "bytes")


def read_fetch_secret(path: str | Path) -> bytes:
    """Of `connector.fetch.secret_file`. One trailing line end is not part of it."""
    least, most = MIN_FETCH_SECRET_BYTES, MAX_FETCH_SECRET_BYTES
    return _read_secret(path, "connector.fetch.secret_file", least, most, "random bytes")


def _read_secret(path: str | Path, field: str, least: int, most: int, what: str) -> bytes:
    raw = Path(path).read_bytes()
    secret = raw[:-1] if raw.endswith(b"\n") else raw
    if not least <= len(secret) <= most:
        raise ContractError(field, len(secret), f"a file with {least} to {most} {what}", secret=True)
    return secret
