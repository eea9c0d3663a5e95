"""scripts/setup_env.py: what is current stays, what was interrupted starts over, CUDA never comes in by accident.

The folder is a temporary one and pip is a script of three lines, so nothing is installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with every place it writes to moved below tmp_path."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("VENV", "VENV_PYTHON", "OWNER_MARK", "ENVIRONMENT_STAMP", "PROJECT_STAMP"):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).relative_to(ROOT))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["setup_env.py"])
    monkeypatch.delenv("TORCH", raising=False)  # CI sets it
    return module


@pytest.fixture
def steps(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the commands that set-up ran, instead of running them; creating the environment makes an empty one."""
    ran: list[str] = []

    def create() -> None:
        setup_env.VENV_PYTHON.parent.mkdir(parents=True)
        setup_env.VENV_PYTHON.touch()
        setup_env.OWNER_MARK.touch()
        ran.append("create")

    monkeypatch.setattr(setup_env, "create_environment", create)
    monkeypatch.setattr(setup_env, "install_torch", lambda policy: ran.append(f"torch {policy}"))
    monkeypatch.setattr(setup_env, "run", lambda *command: ran.append(Path(command[-1]).name))
    return ran


def test_second_time_does_nothing(setup_env: ModuleType, steps: list[str], tmp_path: Path) -> None:
    assert setup_env.main() == 0
    assert steps == [
        "create",
        "lock.txt",
        "no-deps.txt",
        "oldest-nats.txt",
        "torch auto",
        setup_env.PROBE,
        tmp_path.name,
    ]
    steps.clear()
    assert setup_env.main() == 0
    assert steps == []


@pytest.mark.parametrize("file", ["LOCK", "NO_DEPS", "TORCH", "OLDEST_NATS"])
def test_a_changed_lock_makes_it_anew(
    setup_env: ModuleType, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    setup_env.main()
    (setup_env.VENV / "left-over").touch()
    changed = tmp_path / "changed.txt"
    changed.write_text(getattr(setup_env, file).read_text() + "\n# changed\n")
    monkeypatch.setattr(setup_env, file, changed)
    steps.clear()
    assert setup_env.main() == 0
    assert steps[0] == "create"
    assert not (setup_env.VENV / "left-over").exists()


def test_a_changed_pyproject_only_registers_again(
    setup_env: ModuleType, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_env.main()
    changed = tmp_path / "changed.toml"
    changed.write_text("[project]\n")
    monkeypatch.setattr(setup_env, "PYPROJECT", changed)
    steps.clear()
    assert setup_env.main() == 0
    assert steps == [tmp_path.name]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), "SetupError"])
def test_an_interrupted_set_up_starts_over(
    setup_env: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch, fault: BaseException | str
) -> None:
    def break_off(policy: str) -> None:
        raise setup_env.SetupError("no network") if isinstance(fault, str) else fault

    with monkeypatch.context() as patch:
        patch.setattr(setup_env, "install_torch", break_off)
        assert setup_env.main() != 0
    assert not setup_env.ENVIRONMENT_STAMP.exists()
    steps.clear()
    assert setup_env.main() == 0
    assert steps[0] == "create"


def test_an_environment_of_somebody_else_is_left_alone(
    setup_env: ModuleType, steps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = setup_env.VENV / "pyvenv.cfg"
    theirs.parent.mkdir()
    theirs.touch()
    assert setup_env.main() == 1
    assert "was not made by this set-up" in capsys.readouterr().err
    assert theirs.exists()
    assert steps == []


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_another_python_is_refused(
    setup_env: ModuleType,
    steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: tuple[int, int, int],
) -> None:
    monkeypatch.setattr("sys.version_info", version)
    assert setup_env.main() == 1
    error = capsys.readouterr().err
    assert "3.10 to 3.13 is needed" in error
    assert "PYTHON=" in error
    assert steps == []


def fake_pip(setup_env: ModuleType, cpu_build: str) -> Path:
    """A `python -m pip` that logs its arguments and treats the CPU build of torch as told: found, missing or broken."""
    log: Path = setup_env.ROOT / "pip.log"
    answers = {
        "found": "exit 0",
        "missing": "echo 'ERROR: No matching distribution found for torch==2.13.0+cpu' >&2; exit 1",
        "constrained": "echo 'ERROR: ResolutionImpossible: for help visit the documentation' >&2; exit 1",
        "broken": "echo 'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES' >&2; exit 1",
    }
    setup_env.VENV_PYTHON.parent.mkdir(parents=True)
    setup_env.VENV_PYTHON.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *+cpu*) {answers[cpu_build]};; *) exit 0;; esac\n'
    )
    setup_env.VENV_PYTHON.chmod(0o755)
    return log


def test_the_cpu_build_is_taken_where_pip_finds_it(setup_env: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    log = fake_pip(setup_env, "found")
    setup_env.install_torch("auto")
    (command,) = log.read_text().splitlines()
    assert command.endswith("--no-deps torch==2.13.0+cpu")
    assert "NOTE" not in capsys.readouterr().out


@pytest.mark.parametrize("cpu_build", ["missing", "constrained"])
def test_the_plain_build_comes_with_a_notice(
    setup_env: ModuleType, capsys: pytest.CaptureFixture[str], cpu_build: str
) -> None:
    log = fake_pip(setup_env, cpu_build)
    setup_env.install_torch("auto")
    _, command = log.read_text().splitlines()
    assert command.endswith("torch==2.13.0")
    assert "--no-deps" not in command
    assert "several GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "cpu_build", "message"),
    [("cpu", "missing", "TORCH=cpu forbids"), ("auto", "broken", "DO NOT MATCH"), ("cpu", "broken", "DO NOT MATCH")],
)
def test_cuda_never_comes_in_by_accident(setup_env: ModuleType, policy: str, cpu_build: str, message: str) -> None:
    log = fake_pip(setup_env, cpu_build)
    with pytest.raises(setup_env.SetupError, match=message):
        setup_env.install_torch(policy)
    assert len(log.read_text().splitlines()) == 1
