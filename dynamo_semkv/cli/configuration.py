"""The configuration that a verb was given, or the reason why it is refused."""

from __future__ import annotations

import os
import sys

from dynamo_semkv.config.load import Loaded, load_config, read_salt_key
from dynamo_semkv.config.schema import require_request_local_kv
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY

CONFIG_VARIABLE = "SEMKV_CONFIG"
HELP = f"YAML file; default: ${CONFIG_VARIABLE}, else the defaults. SEMKV_<SECTION>__<FIELD> overrides a field"


def default_path() -> str | None:
    return os.environ.get(CONFIG_VARIABLE)


def load_or_say(path: str | None) -> Loaded | None:
    """None when it is refused, with the reason on stderr: everything that can be refused before anything is started."""
    try:
        loaded = load_config(path, os.environ)
        require_request_local_kv(loaded.config, advertised=False)
        read_salt_key(loaded.config.security.salt_key_file, DEFAULT_SALT_KEY)
    except (ContractError, OSError) as error:
        print(f"{path or 'defaults'}: {error}", file=sys.stderr)
        return None
    return loaded
