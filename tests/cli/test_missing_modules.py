"""A command whose libraries are not installed says which, and how they are had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_semkv.cli.command import main
from dynamo_semkv.cli.exit_status import REFUSED


@pytest.mark.parametrize(
    ("arguments", "module", "remedy"),
    [(["status", "--url", "http://127.0.0.1:1"], "rich", "[router]"), (["serve"], "dynamo", "ai-dynamo 1.6")],
)
def test_a_module_that_is_missing_is_named_with_its_remedy(arguments: list[str], module: str, remedy: str) -> None:
    """In a process of its own: modules that are imported twice are two."""
    program = (
        f"import sys; sys.modules[{module!r}] = None; from dynamo_semkv.cli.command import main; "
        f"sys.exit(main({arguments!r}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == REFUSED, ran.stderr
    assert f"{arguments[0]}: '{module}' is not installed here" in ran.stderr
    assert remedy in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_router_needs_no_secret_of_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text("connector: {fetch: {enabled: true, secret_file: /nowhere/secret}}\n")
    assert main(["check-config", str(file)]) == 0
    assert "warning: connector.fetch.secret_file" in capsys.readouterr().err
