"""The files that a configuration names: there, of the right kind, readable. What they hold is checked by whoever reads
them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts.errors import ContractError

_FILE = "a file that is there and can be read"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def missing_files(config: Config) -> Iterator[ContractError]:
    """Of what a router reads."""
    yield from missing_everywhere(config)
    for field, path in (
        ("security.advise_token_file", config.security.advise_token_file),
        ("dashboard.token_file", config.dashboard.token_file),
    ):
        if not _readable(path):
            yield ContractError(field, path, _FILE)
    model = config.model.path
    # `owner/name` may be a model that Dynamo resolves itself; anything else is a directory, as a worker's card names
    # it.
    if model is not None and not Path(model).is_dir() and not _HUB_NAME.fullmatch(model):
        yield ContractError("model.path", model, "a directory that is there, with tokenizer and chat template")


def missing_everywhere(config: Config) -> Iterator[ContractError]:
    """Of what routers and workers both read."""
    for field, path in (
        ("bus.credentials_file", config.bus.credentials_file),
        ("bus.tls_ca", config.bus.tls_ca),
        ("security.salt_key_file", config.security.salt_key_file),
    ):
        if not _readable(path):
            yield ContractError(field, path, _FILE)


def missing_on_workers(config: Config) -> Iterator[ContractError]:
    """What only the workers read: a router of the same file may lack it, and must where it is a secret."""
    path = config.connector.fetch.secret_file
    if not _readable(path):
        yield ContractError("connector.fetch.secret_file", path, f"{_FILE}, on the workers")
    disk = config.connector.disk_path
    if disk is not None and Path(disk).exists() and not Path(disk).is_dir():
        yield ContractError("connector.disk_path", disk, "a directory, or what can be made one, on the workers")


def _readable(path: str | None) -> bool:
    """Also of none."""
    return path is None or (Path(path).is_file() and os.access(path, os.R_OK))


__all__ = ["missing_everywhere", "missing_files", "missing_on_workers"]
