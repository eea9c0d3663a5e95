"""The command line: `serve` and `check-config`.

Only `serve` needs an installed Dynamo; it is imported there and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

from dynamo_semkv import __version__
from dynamo_semkv.config.load import Loaded, load_config, read_salt_key
from dynamo_semkv.config.schema import plain, require_request_local_kv
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY

OK, REFUSED = 0, 2
CONFIG_VARIABLE = "SEMKV_CONFIG"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a configuration that is refused."""
    arguments = _parser().parse_args(argv)
    try:
        loaded = _load(arguments.config)
    except (ContractError, OSError) as error:
        print(f"{arguments.config or 'defaults'}: {error}", file=sys.stderr)
        return REFUSED
    if arguments.command == "check-config":
        return _check(loaded, show=arguments.show)
    return _serve(loaded, arguments.log_level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo_semkv", description="Semantic KV placement for NVIDIA Dynamo.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    config_help = (
        f"YAML file; default: ${CONFIG_VARIABLE}, else the defaults. SEMKV_<SECTION>__<FIELD> overrides a field"
    )
    serve = commands.add_parser("serve", help="serve the public model in front of the workers", allow_abbrev=False)
    serve.add_argument("--config", "-c", metavar="FILE", default=os.environ.get(CONFIG_VARIABLE), help=config_help)
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    check = commands.add_parser("check-config", help="read a configuration, say what is wrong", allow_abbrev=False)
    check.add_argument("config", metavar="FILE", nargs="?", default=os.environ.get(CONFIG_VARIABLE), help=config_help)
    check.add_argument("--show", action="store_true", help="print every value that is in force, as JSON")
    return parser


def _load(path: str | None) -> Loaded:
    """Everything that can be refused before anything is started."""
    loaded = load_config(path, os.environ)
    require_request_local_kv(loaded.config, advertised=False)
    read_salt_key(loaded.config.security.salt_key_file, DEFAULT_SALT_KEY)
    return loaded


def _check(loaded: Loaded, *, show: bool) -> int:
    config = loaded.config
    print(
        f"{loaded.source}: ok, hash {loaded.hash}, placement {config.placement.mode.value}, "
        f"materialization {config.connector.materialization.value}, hints {'on' if config.hints.enabled else 'off'}"
    )
    if show:
        print(json.dumps(plain(config), indent=2))
    return OK


def _serve(loaded: Loaded, log_level: str) -> int:
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from dynamo_semkv.router.process import run

    try:
        return run(loaded)
    except ContractError as error:
        print(f"{loaded.source}: {error}", file=sys.stderr)
        return REFUSED
