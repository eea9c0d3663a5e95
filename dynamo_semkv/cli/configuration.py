"""Loads the configuration that a verb was given, or prints why it is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dynamo_semkv.bus.access_files import unusable
from dynamo_semkv.config.files import missing_files, missing_on_workers
from dynamo_semkv.config.load import Loaded, load_config, read_salt_key
from dynamo_semkv.config.schema import require_request_local_kv
from dynamo_semkv.contracts.errors import ContractError, each
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from dynamo_semkv.dashboard.access import read_token

CONFIG_VARIABLE = "SEMKV_CONFIG"
BROKER_VARIABLES = ("SEMKV_BUS__URL", "NATS_SERVER")
HELP = f"YAML file; default: ${CONFIG_VARIABLE}, else the defaults. SEMKV_<SECTION>__<FIELD> overrides a field"


def default_path() -> str | None:
    """The file that SEMKV_CONFIG names; None: the variable is not set."""
    return os.environ.get(CONFIG_VARIABLE)


def names_a_broker(loaded: Loaded) -> bool:
    """False if neither a file nor a variable was given: then `bus.url` is a guess, and a broker that does not answer
    there means nothing."""
    return loaded.path is not None or any(os.environ.get(name) for name in BROKER_VARIABLES)


def load_or_report(path: str | None) -> Loaded | None:
    """Checks all that can be refused before anything is started. None if the configuration is refused, with every
    reason on stderr."""
    try:
        loaded = load_config(path, os.environ)
    except (ContractError, OSError) as error:
        _print_errors(path, each(error) if isinstance(error, ContractError) else (error,))
        return None
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for missing in missing_on_workers(loaded.config):
        print(f"warning: {missing}; nothing here needs it", file=sys.stderr)
    refused = list(_refused(loaded))
    if refused:
        _print_errors(path, refused)
        return None
    return loaded


def _refused(loaded: Loaded) -> Iterator[Exception]:
    """Errors of a file whose every value is allowed: something that it names is not there, or may not be served."""
    config = loaded.config
    missing = list(missing_files(config))
    yield from missing
    fields = {error.field for error in missing}
    checks: list[Callable[[], object]] = [lambda: require_request_local_kv(config, advertised=False)]
    yield from (error for error in unusable(config.bus) if error.field not in fields)
    if "security.salt_key_file" not in fields:
        checks.append(lambda: read_salt_key(config.security.salt_key_file, DEFAULT_SALT_KEY))
    for field, file in (
        ("dashboard.token_file", config.dashboard.token_file),
        ("security.advise_token_file", config.security.advise_token_file),
    ):
        if file is not None and field not in fields:
            checks.append(partial(read_token, file, field))
    for check in checks:
        try:
            check()
        except (ContractError, OSError) as error:
            yield error


def _print_errors(path: str | None, errors: Sequence[Exception]) -> None:
    name = path or "defaults"
    if len(errors) == 1:
        print(f"{name}: {errors[0]}", file=sys.stderr)
        return
    print(f"{name}: {len(errors)} errors", *(f"  {error}" for error in errors), sep="\n", file=sys.stderr)
