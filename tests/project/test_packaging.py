"""The wheel holds what it should, imports by itself, and the lock answers for every requirement."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUPPORTED_PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def requirement_lines(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_requirements() -> list[Requirement]:
    """What set-up installs: the core, the extras that scripts/lock.sh names, the groups."""
    project, groups = PYPROJECT["project"], PYPROJECT["dependency-groups"]
    texts = [*project["dependencies"]]
    extras = re.findall(r"--extra (\S+)", (ROOT / "scripts" / "lock.sh").read_text())
    assert set(extras) <= set(project["optional-dependencies"])
    for group in (*(project["optional-dependencies"][extra] for extra in extras), *groups.values()):
        texts.extend(entry for entry in group if isinstance(entry, str))
    return [r for r in map(Requirement, texts) if canonical(r.name) != project["name"]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_packages_and_their_type_marks(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"dynamo_semkv/py.typed", "worker_connector/py.typed", "graphs/__init__.py"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dynamo_semkv", "worker_connector", "graphs"}


def test_wheel_installs_and_imports_by_itself(wheel: Path, tmp_path: Path) -> None:
    """Installed into a folder of its own and run from elsewhere: this checkout is not on the path (-I, another cwd)."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True, text=True)
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import dynamo_semkv, worker_connector, graphs\n"
        "print(*(m.__file__ for m in (dynamo_semkv, worker_connector, graphs)), sep='\\n')"
    )
    shown = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(shown) == 3
    assert all(Path(line).is_relative_to(target) for line in shown)


def test_wheel_carries_the_kubernetes_graphs_and_the_launch_script(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = [p for folder in ("kubernetes", "launch") for p in (ROOT / "graphs" / folder).rglob("*") if p.is_file()]
    assert len(wanted) > 10
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names


def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    (tmp_path / "source").mkdir()
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(tmp_path / "source")], check=True)
    (source,) = (tmp_path / "source").iterdir()
    again = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(again, cwd=source, check=True, capture_output=True, text=True)
    (rebuilt,) = (tmp_path / "again").glob("*.whl")
    assert set(zipfile.ZipFile(rebuilt).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_the_command_of_the_wheel_runs_without_this_checkout(wheel: Path, tmp_path: Path) -> None:
    """The core's verbs, with nothing but the core's requirements and the wheel on the path."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True, text=True)
    scripts = [path.name for path in (target / "bin").iterdir()]
    assert sorted(scripts) == ["dynamo-semkv", "dynamo_semkv"]
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r}); from dynamo_semkv.cli import main; "
        f"sys.exit(main(sys.argv[1:]))"
    )
    for arguments, says in ((["--version"], "0.1.0"), (["check-config"], "ok, hash")):
        shown = subprocess.run(
            [sys.executable, "-I", "-c", program, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        assert says in shown.stdout


def test_every_extra_of_both_is_satisfied_by_the_lock(wheel: Path, tmp_path: Path) -> None:
    """pip itself, without an index: whatever an extra asks for is installed here in a version that fits. `make
    packages` installs each extra in an environment of its own, and resolves semblend and peers, which the lock leaves
    out."""
    locked = re.findall(r"--extra (\S+)", (ROOT / "scripts" / "lock.sh").read_text())
    extras = ",".join(sorted({*locked, "telemetry"}))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    for artifact in (wheel, sdist):
        pip = [sys.executable, "-m", "pip", "install", *options, f"{artifact}[{extras}]"]
        said = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr


def test_make_packages_runs_what_every_extra_brings() -> None:
    source = (ROOT / "scripts" / "check_packages.py").read_text()
    smoke = re.search(r"^SMOKE = \{.*?^\}", source, re.MULTILINE | re.DOTALL)
    assert smoke is not None
    said = set(re.findall(r'^    "(\w*)":', smoke[0], re.MULTILINE))
    assert said == {"", *PYPROJECT["project"]["optional-dependencies"]}


def test_the_workflow_runs_verbs_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = re.findall(r"run: make (\w+)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"packages", "audit", "demo"} <= set(verbs)
    for verb in verbs:
        assert re.search(rf"^{verb}:.*##", makefile, re.MULTILINE), verb


def test_exceptions_of_the_audit_have_their_reason() -> None:
    for line in (ROOT / "requirements" / "audit-ignore.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Z][A-Za-z0-9-]+  \S.{20,}", line), line


def test_version_is_said_once() -> None:
    import dynamo_semkv

    assert dynamo_semkv.__version__ == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("python", SUPPORTED_PYTHONS)
def test_lock_has_one_version_of_everything_declared(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    locked: dict[str, Requirement] = {}
    for line in requirement_lines("lock.txt"):
        if line.marker is None or line.marker.evaluate(environment):
            assert canonical(line.name) not in locked, f"{line.name} is locked twice for Python {python}"
            locked[canonical(line.name)] = line
    for pinned in (*requirement_lines("torch.txt"), *requirement_lines("no-deps.txt")):
        assert canonical(pinned.name) not in locked, f"{pinned.name} is installed apart from the lock"
        locked[canonical(pinned.name)] = pinned

    for wanted in (*declared_requirements(), *requirement_lines("lock.in")):
        if wanted.marker is not None and not wanted.marker.evaluate(environment):
            continue
        (exact,) = locked[canonical(wanted.name)].specifier
        assert exact.operator == "=="
        assert wanted.specifier.contains(exact.version, prereleases=True), f"{wanted} but {exact} is locked"


def test_lock_files_name_no_index() -> None:
    for path in (ROOT / "requirements").iterdir():
        options = [line for line in path.read_text().splitlines() if line.startswith("-") or "://" in line]
        assert not options, f"{path.name}: {options}"
