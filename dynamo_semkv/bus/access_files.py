"""Credentials and certificates: checked before the client gets them, since a bad file would block it for ever.

    credentials(settings) -> RawCredentials | None
    tls_context(settings) -> ssl.SSLContext | None
    unusable(settings) -> errors                     both, for whoever checks a configuration

The client reads a credentials file without the marker of a JWT in an endless loop that no timeout ends (nats-py 2.16,
`Client._read_creds_user_jwt`), and it reports whatever else is wrong with either file as an outage of the broker.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import nkeys
from nats.aio.client import RawCredentials

from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts.errors import ContractError

_MAX_BYTES = 1024 * 1024
_JWT, _SEED = "BEGIN NATS USER JWT", "BEGIN USER NKEY SEED"


def credentials(settings: BusConfig) -> RawCredentials | None:
    """Raises ContractError for a file that holds no user's credentials; its content is not shown."""
    path = settings.credentials_file
    if path is None:
        return None
    field, allowed = (
        "bus.credentials_file",
        "a file of credentials as `nsc generate creds` writes it, with a JWT and an NKEY seed",
    )
    try:
        with Path(path).open("rb") as file:
            lines = file.read(_MAX_BYTES).decode("ascii").splitlines()
        jwt, seed = (_line_after(marker, lines) for marker in (_JWT, _SEED))
        if jwt.count(".") != 2:
            raise ValueError("no JWT")
        nkeys.from_seed(bytearray(seed, "ascii")).wipe()
    except OSError as error:
        raise ContractError(field, f"{path} ({type(error).__name__})", allowed) from error
    except (ValueError, nkeys.NkeysError) as error:
        raise ContractError(field, f"{path} (its content is not shown)", allowed) from error
    return RawCredentials(
        "\n".join(lines) + "\n"
    )  # the client takes the carriage return of another system for a part of the seed


def tls_context(settings: BusConfig) -> ssl.SSLContext | None:
    """Raises ContractError for a file that holds no certificate."""
    if settings.tls_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=settings.tls_ca)
    except OSError as error:  # ssl.SSLError is one
        raise ContractError(
            "bus.tls_ca", f"{settings.tls_ca} ({type(error).__name__})", "a PEM file with the authority's certificates"
        ) from error


def unusable(settings: BusConfig) -> Iterator[ContractError]:
    """One error for each file that cannot be used; nothing for settings without files."""
    for read in (credentials, tls_context):
        try:
            read(settings)
        except ContractError as error:
            yield error


def _line_after(marker: str, lines: list[str]) -> str:
    """The line after the one with `marker`. Raises ValueError where there is none."""
    at = next((at for at, line in enumerate(lines) if marker in line), None)
    if at is None or at + 1 >= len(lines):
        raise ValueError(f"no {marker}")
    return lines[at + 1]
