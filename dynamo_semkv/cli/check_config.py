"""`check-config` reads a configuration and says what is in force, or what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dynamo_semkv.cli import configuration
from dynamo_semkv.cli.exit_status import OK, REFUSED
from dynamo_semkv.config.json_schema import json_schema
from dynamo_semkv.config.schema import Config, plain
from dynamo_semkv.contracts.errors import ContractError

_CLOSE_SECONDS = 5.0


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser."""
    parser = commands.add_parser("check-config", help="read a configuration, say what is wrong", allow_abbrev=False)
    parser.add_argument(
        "config", metavar="FILE", nargs="?", default=configuration.default_path(), help=configuration.HELP
    )
    parser.add_argument("--show", action="store_true", help="print every value that is in force, as JSON")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a configuration, for editors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """OK, or REFUSED with the reasons on stderr."""
    if arguments.schema:
        print(json.dumps(json_schema(), indent=2))
        return OK
    loaded = configuration.load_or_report(arguments.config)
    if loaded is None:
        return REFUSED
    config = loaded.config
    try:
        _make_evidence(config)
    except ContractError as error:
        print(f"{loaded.source}: {error}", file=sys.stderr)
        return REFUSED
    print(
        f"{loaded.source}: ok, hash {loaded.hash}, placement {config.placement.mode.value}, materialization "
        f"{config.connector.materialization.value}, hints {'on' if config.hints.enabled else 'off'}"
    )
    if arguments.show:
        print(json.dumps(plain(config), indent=2))
    return OK


def _make_evidence(config: Config) -> None:
    """Loads what the router would load from names and directories: nothing else shows whether a plugin can be imported,
    or a model read. Raises ContractError. Imports nothing where only our own providers are asked for."""
    if not any(
        (
            config.plugins.providers,
            config.plugins.scorers,
            config.evidence.embedding.enabled,
            config.evidence.semblend.enabled,
        )
    ):
        return
    from dynamo_semkv.evidence.provider import Closes
    from dynamo_semkv.router.plugins import plugged_scorers
    from dynamo_semkv.router.providers import providers

    for provider in providers(config):
        if isinstance(provider, Closes):
            provider.close(_CLOSE_SECONDS)
    plugged_scorers(config, lambda error: None)
