"""A command whose libraries are not installed says which, and how they are had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dynamo_semkv.cli.command import main
from dynamo_semkv.cli.exit_status import REFUSED


@pytest.mark.parametrize(
    ("arguments", "module", "remedy"),
    [(["status", "--url", "http://127.0.0.1:1"], "rich", "[router]"), (["serve"], "dynamo", "ai-dynamo 1.6")],
)
def test_a_module_that_is_missing_is_named_with_its_remedy(
    arguments: list[str],
    module: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(("dynamo_semkv.router", "dynamo_semkv.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments) == REFUSED
    said = capsys.readouterr().err
    assert f"{arguments[0]}: '{module}' is not installed here" in said
    assert remedy in said


def test_a_router_needs_no_secret_of_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text("connector: {fetch: {enabled: true, secret_file: /nowhere/secret}}\n")
    assert main(["check-config", str(file)]) == 0
    assert "warning: connector.fetch.secret_file" in capsys.readouterr().err
