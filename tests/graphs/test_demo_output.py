"""What the local graph says while nobody can see a progress bar: a line each for what starts and for each scenario."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dynamo_semkv.bench.scenarios import ChatRequest, Scenario
from graphs.local import demo
from graphs.local.command import main
from graphs.local.settings import GraphSettings

SCENARIOS = [
    Scenario(name, f"title of {name}", (ChatRequest(({"role": "user", "content": "x"},), None, 1),) * 3)
    for name in ("a", "b")
]
PARTS = ("nats-server", "worker-0", "frontend")


class FakeGraph:
    settings = GraphSettings(model="tiny")
    frontend_url = "http://127.0.0.1:1"

    def page_url(self) -> str:
        return "http://127.0.0.1:2"

    def up(self, progress: Callable[[str], None]) -> None:
        for part in PARTS:
            progress(part)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=80)


def printed(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


@pytest.fixture
def _answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, *_: Any) -> None: ...

        async def send(self, _: Any) -> Any:
            return SimpleNamespace(ok=True, request_id="r")

    async def nothing(*_: Any) -> Any:
        return [], 0

    monkeypatch.setattr(demo, "ChatClient", Client)
    monkeypatch.setattr(demo, "read_routes", nothing)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_for_each_part_that_starts(terminal: bool) -> None:
    on = console(terminal=terminal)
    demo.bring_up(FakeGraph(), on)  # type: ignore[arg-type]
    lines = printed(on).splitlines()
    assert "2 workers x 2 ranks" in lines[0]
    assert [line for line in lines if line.startswith("Starting: ")] == (
        [] if terminal else [f"Starting: {part}" for part in PARTS]
    )


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.usefixtures("_answered")
async def test_a_line_for_each_scenario(terminal: bool) -> None:
    on = console(terminal=terminal)
    await demo.measure(FakeGraph(), SCENARIOS, on)  # type: ignore[arg-type]
    assert printed(on).count("3 requests, ") == (0 if terminal else len(SCENARIOS))
    if not terminal:
        assert [line.partition(":")[0] for line in printed(on).splitlines()] == [s.title for s in SCENARIOS]


def test_help_names_the_verb_that_options_alone_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Without a verb: up." in said
    assert "(the default)" in said
