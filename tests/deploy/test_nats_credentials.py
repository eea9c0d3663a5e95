"""`bus.credentials_file`: a NATS `.creds` file, on a real server that trusts an operator."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import nkeys
import pytest

from dynamo_semkv.bus.setup import BusError, set_up
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.config.schema import BusConfig
from tests.deploy import nats_example

_UNLIMITED = dict.fromkeys(
    ("subs", "data", "payload", "conn", "leaf", "imports", "exports", "mem_storage", "disk_storage"), -1
)


def key(prefix: int) -> tuple[nkeys.KeyPair, str, str]:
    """(pair, public key, seed)"""
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    pair = nkeys.from_seed(seed)
    return pair, pair.public_key.decode(), seed.decode()


def token(issuer: tuple[nkeys.KeyPair, str, str], subject: str, claims: dict[str, Any]) -> str:
    def part(value: dict[str, Any]) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    body = {
        "iat": int(time.time()),
        "iss": issuer[1],
        "sub": subject,
        "name": claims["type"],
        "nats": {**claims, "version": 2},
    }
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).rstrip(b"=").decode()
    signed = part({"typ": "JWT", "alg": "ed25519-nkey"}) + b"." + part(body)
    return (signed + b"." + base64.urlsafe_b64encode(issuer[0].sign(signed)).rstrip(b"=")).decode()


def credentials(account: tuple[nkeys.KeyPair, str, str]) -> str:
    user = key(nkeys.PREFIX_BYTE_USER)
    claims = {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
    return (
        f"-----BEGIN NATS USER JWT-----\n{token(account, user[1], claims)}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user[2]}\n------END USER NKEY SEED------\n"
    )


@pytest.mark.graph
async def test_credentials_file_opens_the_broker_and_a_foreign_one_does_not(tmp_path: Path) -> None:
    system = key(nkeys.PREFIX_BYTE_ACCOUNT)
    operator, account, stranger = (
        key(nkeys.PREFIX_BYTE_OPERATOR),
        key(nkeys.PREFIX_BYTE_ACCOUNT),
        key(nkeys.PREFIX_BYTE_ACCOUNT),
    )
    limits = {**_UNLIMITED, "wildcards": True, "streams": -1, "consumer": -1}
    config = tmp_path / "nats.conf"
    accounts = {account[1]: limits, system[1]: dict(_UNLIMITED, mem_storage=0, disk_storage=0)}
    preloaded = "\n".join(
        f"{name}: {token(operator, name, {'type': 'account', 'limits': values})}" for name, values in accounts.items()
    )
    config.write_text(
        f"operator: {token(operator, operator[1], {'type': 'operator'})}\n"
        f"system_account: {system[1]}\nresolver: MEMORY\nresolver_preload: {{\n{preloaded}\n}}\n"
        f"jetstream {{ store_dir: {json.dumps(str(tmp_path / 'store'))} }}\n"
    )
    mine, foreign = tmp_path / "mine.creds", tmp_path / "foreign.creds"
    mine.write_text(credentials(account))
    foreign.write_text(credentials(stranger))
    with nats_example.running(config, tmp_path) as broker:
        url = f"nats://127.0.0.1:{broker.port}"
        found = await set_up(BusConfig(url=url, credentials_file=str(mine), stream_max_bytes=2**20))
        assert [stream.name for stream in found] == list(STREAMS)
        with pytest.raises(BusError, match=r"[Aa]uthorization"):
            await set_up(BusConfig(url=url, credentials_file=str(foreign)))
