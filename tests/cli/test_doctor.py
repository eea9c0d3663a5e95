"""`doctor` with a page and without a file: it says that it did not look at a broker, and does not guess one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.cli import main
from dynamo_semkv.cli.exit_status import FAILED, OK
from tests.dashboard.serving import served

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SEMKV_", "DYN_", "NATS_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a broker that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port meanwhile
        yield f"nats://127.0.0.1:{taken.getsockname()[1]}"


async def doctor(capsys: Captured, *arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, the finding of the broker)."""
    async with served() as site:
        status = await asyncio.to_thread(main, ["doctor", "--url", site.server.url, "--json", *arguments])
    (found,) = (finding for finding in json.loads(capsys.readouterr().out) if finding["check"] == "bus")
    return status, found


async def test_without_a_file_the_broker_is_not_checked(capsys: Captured) -> None:
    status, found = await doctor(capsys)
    assert (status, found["level"]) == (OK, "warn")
    assert "not checked: no file was given" in found["detail"]
    assert "--config" in found["remedy"]


@pytest.mark.parametrize("variable", ["SEMKV_BUS__URL", "NATS_SERVER"])
async def test_a_broker_that_a_variable_names_is_checked(
    variable: str, nobody: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, nobody)
    status, found = await doctor(capsys)
    assert (status, found["level"]) == (FAILED, "fail")
    assert nobody.removeprefix("nats://") in found["detail"]


async def test_a_broker_that_the_file_names_is_checked(nobody: str, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text(f"bus: {{url: '{nobody}'}}\n")
    status, found = await doctor(capsys, "--config", str(file))
    assert (status, found["level"]) == (FAILED, "fail")


async def test_from_a_workstation_the_cluster_s_name_means_nothing_and_a_forwarded_port_is_taken(
    nobody: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text("bus: {url: 'nats://semkv-nats.invalid:4222'}\n")
    status, found = await doctor(capsys, "--config", str(file))
    assert (status, found["level"]) == (FAILED, "fail")
    assert "run doctor in a router's pod" in found["remedy"]
    assert "SEMKV_BUS__URL" in found["remedy"]
    monkeypatch.setenv("SEMKV_BUS__URL", nobody)  # stands for `kubectl port-forward`
    _, found = await doctor(capsys, "--config", str(file))
    assert nobody.removeprefix("nats://") in found["detail"]


def test_without_file_and_page_the_default_is_checked(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def inspect(settings: Any) -> Any:
        from dynamo_semkv.bus.inspection import BusInspection

        asked.append(settings.url)
        return BusInspection(settings.url, error="away")

    monkeypatch.setattr("dynamo_semkv.bus.inspection.inspect", inspect)
    assert main(["doctor"]) == FAILED
    assert asked == ["nats://127.0.0.1:4222"]
