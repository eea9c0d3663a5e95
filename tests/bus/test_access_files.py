"""Credentials and certificate: refused by name, and never a reason to wait without end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nkeys
import pytest

from dynamo_semkv.bus.access_files import credentials, tls_context
from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.contracts.errors import ContractError
from tests.bus.waiting import settings, until

NOBODY = "nats://127.0.0.1:1"


def written(path: Path, *, end: str = "\n") -> Path:
    seed = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER).decode()
    lines = ["-----BEGIN NATS USER JWT-----", "head.body.sign", "------END NATS USER JWT------", ""]
    lines += ["-----BEGIN USER NKEY SEED-----", seed, "------END USER NKEY SEED------", ""]
    path.write_bytes(end.join(lines).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_credentials_are_read_whatever_ends_their_lines(tmp_path: Path, end: str) -> None:
    found = credentials(settings(NOBODY, credentials_file=str(written(tmp_path / "user.creds", end=end))))
    assert found is not None
    assert "\r" not in found.data


def test_none_is_none() -> None:
    assert credentials(settings(NOBODY)) is None
    assert tls_context(settings(NOBODY)) is None


def test_what_they_hold_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.write_text("-----BEGIN NATS USER JWT-----\nconfidential\n")
    with pytest.raises(ContractError, match=r"bus\.credentials_file: got .*not shown") as caught:
        credentials(settings(NOBODY, credentials_file=str(file)))
    assert "confidential" not in str(caught.value)


async def test_credentials_that_were_emptied_do_not_stop_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A secret may be replaced while a process runs; the client alone would read an empty file without end."""
    file = tmp_path / "user.creds"
    file.touch()
    publisher = BusPublisher(settings(NOBODY, credentials_file=str(file)), "test")
    publisher.start()
    try:
        await until("told", lambda: "bus.credentials_file" in caplog.text)
    finally:
        await asyncio.to_thread(publisher.close, 5.0)
