"""A reload under running requests: none of them sees half of each configuration, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from dynamo_semkv.config.load import Loaded, build, config_hash, load_config
from dynamo_semkv.config.watch import ConfigWatch
from dynamo_semkv.router.reload import Reloader
from tests.router.fakes import A1, FakeRouter, a_request, donor_on_a1

PATIENT = {"deadline_ms": 1000, "exact_deadline_ms": 1000}
ENFORCE = build({"placement": {"mode": "enforce"}, "evidence": PATIENT})
SHADOW = build({"placement": {"mode": "shadow"}, "evidence": PATIENT})


def take_over(fake: FakeRouter, loaded: Loaded) -> None:
    fake.advisor.reload(loaded.config)
    fake.service.reload(loaded)


async def test_the_next_request_has_the_new_mode_hash_and_hints() -> None:
    fake = FakeRouter(lookup=donor_on_a1())
    await fake.run(a_request())
    no_hints = build({"placement": {"mode": "enforce"}, "evidence": PATIENT, "hints": {"enabled": False}})
    for config in (SHADOW, no_hints, build({"placement": {"mode": "off"}})):
        take_over(fake, Loaded(config, config_hash(config), ""))
        await fake.run(a_request())
    placed, shadow, unhinted = fake.journal.opens  # off writes nothing
    assert [o.decision_reason for o in fake.journal.opens] == ["placed", "shadow", "placed"]
    assert (placed.config_hash, shadow.config_hash) == (config_hash(fake.config), config_hash(SHADOW))
    assert [dispatch.pin for dispatch in fake.edge.dispatched] == [A1, None, A1, None]
    assert placed.hinted_tokens == placed.placed_tokens == 960
    assert unhinted.hinted_tokens == 0
    fake.journal.check()


@pytest.mark.parametrize("stage", ["overlap", "loads"])
async def test_a_request_that_is_being_weighed_keeps_the_configuration_that_it_began_with(stage: str) -> None:
    fake = FakeRouter(lookup=donor_on_a1())

    async def gate(at: str) -> None:
        if at == stage:
            take_over(fake, Loaded(SHADOW, config_hash(SHADOW), ""))

    fake.edge.gate = gate
    await fake.run(a_request())
    assert (fake.opened.mode, fake.opened.decision_reason) == ("enforce", "placed")
    assert fake.opened.config_hash == config_hash(fake.config) != config_hash(SHADOW)


class File:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "semkv.yaml"
        self.path.write_text("placement: {mode: shadow}\n")
        self.taken: list[Loaded] = []
        self.reloader = Reloader(ConfigWatch(load_config(self.path, {}), {}), self.taken.append)
        self._at = 2_000_000_000

    def write(self, text: str) -> None:
        self._at += 1
        self.path.write_text(text)
        os.utime(self.path, (self._at, self._at))


async def test_it_logs_what_changed_what_waits_and_a_bad_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = File(tmp_path)
    file.write("placement: {mode: enforce}\nbus: {url: 'nats://b:1'}\n")
    for _ in range(3):
        await file.reloader.check()
    assert [loaded.config.placement.mode.value for loaded in file.taken] == ["enforce"]
    in_force = file.taken[0].hash
    file.write("placement: {mode: bold}\n")
    for _ in range(5):
        await file.reloader.check()
    assert len(file.taken) == 1
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", f"configuration {in_force} is in force; changed: placement.mode"),
        ("WARNING", "takes effect only after a restart: bus.url"),
        (
            "ERROR",
            f"{file.path} is not taken over, configuration {in_force} stays: "
            "placement.mode: got 'bold', allowed: off, shadow, canary, enforce",
        ),
    ]


async def test_asked_it_does_not_wait_for_the_next_look(tmp_path: Path) -> None:
    file = File(tmp_path)
    file.write("placement: {mode: enforce}\n")
    running = asyncio.ensure_future(file.reloader.run(3_600.0))
    file.reloader.request()
    for _ in range(500):
        if file.taken:
            break
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [loaded.config.placement.mode.value for loaded in file.taken] == ["enforce"]


async def test_a_fault_while_taking_over_does_not_end_the_watching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = File(tmp_path)
    calls: list[str] = []

    def apply(loaded: Loaded) -> None:
        calls.append(loaded.config.placement.mode.value)
        if len(calls) == 1:
            raise RuntimeError("no")

    reloader = Reloader(ConfigWatch(load_config(file.path, {}), {}), apply)
    running = asyncio.ensure_future(reloader.run(0.01))
    for mode in ("enforce", "canary"):
        file.write(f"placement: {{mode: {mode}}}\n")
        for _ in range(500):
            if calls[-1:] == [mode]:
                break
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert calls == ["enforce", "canary"]
    assert "was not read (1 so far)" in caplog.text


async def test_without_a_file_a_hang_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    await Reloader(ConfigWatch(load_config(None, {}), {}), lambda loaded: None).check(forced=True)
    assert "there is no configuration file" in caplog.text
