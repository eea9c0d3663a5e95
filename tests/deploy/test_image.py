"""deploy/image: the recipe installs into each layout of Dynamo's runtime image, from what .dockerignore lets
through."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.project.test_repository import SKIPPED_FOLDERS

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "deploy" / "image" / "install.sh"

PYTHON = f"""#!/bin/sh
case "$1 $2" in
  "- ") exec {sys.executable} "$@";;
  "-m pip") [ -n "$HAS_PIP" ] || exit 1; [ "$3" = --version ] || echo "pip $*" > "$SAID";;
  "-m dynamo_semkv") echo installed;;
esac
"""
UV = """#!/bin/sh
echo "uv $* $UV_BREAK_SYSTEM_PACKAGES" > "$SAID"
while [ "$1" != --constraint ]; do shift; done
cp "$2" "$SAID.constraints"
"""


def checkout() -> Iterator[str]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        yield from (str((Path(folder) / name).relative_to(ROOT)) for name in files)


def let_through() -> list[Path]:
    """Files of the build's context, by the patterns that .dockerignore has: whole names, `**/` and `!`. The last that
    fits decides."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    more = [
        ".git/config",
        ".venv/bin/python",
        ".run/jetstream/x",
        "semkv.yaml",
        "dynamo_semkv/__pycache__/a.pyc",
        "graphs/a.key",
    ]
    found = []
    for name in [*checkout(), *more]:
        kept = True
        for pattern in patterns:
            bare = pattern.removeprefix("!").removeprefix("/")
            parts = Path(name).parts
            if bare.startswith("**/"):
                fits = any(fnmatch.fnmatch(part, bare[3:]) for part in parts)
            else:
                fits = any(fnmatch.fnmatch("/".join(parts[: depth + 1]), bare) for depth in range(len(parts)))
            kept = pattern.startswith("!") if fits else kept
        found += [Path(name)] if kept else []
    return found


def test_the_build_sees_sources_and_nothing_that_lies_beside_them(tmp_path: Path) -> None:
    names = let_through()
    assert {name.parts[0] for name in names} == {
        *("pyproject.toml", "README.md", "LICENSE", "dynamo_semkv", "worker_connector", "graphs", "deploy")
    }
    assert Path("deploy/image/install.sh") in names
    assert not [name for name in names if name.suffix in (".key", ".pyc")]
    for name in names:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "src" / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path / "src", check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names_in_it = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(name) for name in names if name.parts[0] in ("dynamo_semkv", "worker_connector", "graphs")}
    assert wanted <= names_in_it


def install(tmp_path: Path, **tools: str) -> subprocess.CompletedProcess[str]:
    """Runs install.sh with stand-ins for `python3` and `uv`; what they were asked for is in `said`."""
    binaries, source = tmp_path / "bin", tmp_path / "source"
    binaries.mkdir()
    source.mkdir()
    for name, text in {"python3": PYTHON, **tools}.items():
        if text.startswith("#!"):
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
    for name in ("bash", "sh", "cp", "rm", "mktemp"):
        (binaries / name).symlink_to(str(shutil.which(name)))
    env = {"PATH": str(binaries), "SAID": str(tmp_path / "said"), "HAS_PIP": tools.get("pip", "")}
    return subprocess.run(
        ["bash", str(INSTALL), str(source)], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_an_environment_with_pip_over_the_engine_s_packages(tmp_path: Path) -> None:
    ran = install(tmp_path, pip="yes", uv=UV)
    assert (ran.returncode, ran.stdout) == (0, "installed\n"), ran.stderr
    said = (tmp_path / "said").read_text()
    assert said.startswith("pip -m pip install --no-cache-dir --constraint ")
    assert said.endswith("/source[router,connector]\n")


def test_an_environment_that_uv_made_without_pip_and_its_versions_stay(tmp_path: Path) -> None:
    ran = install(tmp_path, uv=UV)
    assert (ran.returncode, ran.stdout) == (0, "installed\n"), ran.stderr
    said = (tmp_path / "said").read_text()
    assert f"uv pip install --no-cache --python {tmp_path}/bin/python3 --constraint" in said
    assert said.endswith("/source[router,connector] 1\n"), "an externally managed Python would refuse"
    kept = (tmp_path / "said.constraints").read_text().splitlines()
    assert any(line.startswith("msgspec==") for line in kept)
    assert not [line for line in kept if line.startswith("dynamo-semkv==")]


def test_without_either_it_says_so(tmp_path: Path) -> None:
    ran = install(tmp_path)
    assert ran.returncode == 1
    assert "neither pip for" in ran.stderr


def test_the_dockerfile_runs_what_was_tried_here() -> None:
    text = (ROOT / "deploy" / "image" / "Dockerfile").read_text()
    assert "RUN bash /tmp/dynamo-semkv/deploy/image/install.sh /tmp/dynamo-semkv" in text
    assert os.access(INSTALL, os.X_OK)
