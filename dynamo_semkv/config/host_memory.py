"""How much memory this process may still take: what the machine has left, and what its container's limits leave.

A container sees the whole machine in /proc/meminfo, but the kernel kills it at the limit of its control group or of one
above it. Page cache counts as used there and is given back when somebody needs memory, so it is not counted here.

Sources: proc(5) for `MemAvailable`, cgroups(7) for /proc/self/cgroup, the kernel's cgroup-v2.rst and
cgroup-v1/memory.rst for the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Available(NamedTuple):
    """Bytes that can still be taken, and what sets this bound."""

    size: int
    bound: str


class _Bound(NamedTuple):
    left: int
    total: int
    """Of what is there, or may be taken, with what is taken already."""
    name: str


class _Files(NamedTuple):
    """What one version of control groups calls its files."""

    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]
    """Keys of memory.stat. Pages of tmpfs are not among them: nobody gives those back."""
    inherited: str | None
    """Key of memory.stat: the least limit of this group and of those above it, also of those that a container does not
    see."""


V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
    "hierarchical_memory_limit",
)
V2 = _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"), None)
"""Beyond `memory.high` a process is not killed but slowed down until it stands still, since a slab cannot be swapped or
dropped."""


def available_memory(root: Path = ROOT) -> Available | None:
    """The least of what the machine and each control group above this process leave; None where none of them says.
    `root`: for tests."""
    least = min(_bounds(root), default=None)
    return None if least is None else Available(least.left, f"{least.name} ({least.total})")


def total_memory(root: Path = ROOT) -> Available | None:
    """The same, with what is taken already: what all processes of this container may have together."""
    least = min(_bounds(root), key=lambda bound: bound.total, default=None)
    return None if least is None else Available(least.total, least.name)


def _bounds(root: Path) -> Iterator[_Bound]:
    machine = {key: _number(value.removesuffix("kB")) for key, _, value in _split(root / "proc/meminfo", ":")}
    left, total = machine.get("MemAvailable"), machine.get("MemTotal")
    if left is not None and total is not None:
        yield _Bound(left * 1024, total * 1024, "MemTotal of /proc/meminfo")
    for folder, files in _control_groups(root):
        bound = _bound(folder, files)
        if bound is not None:
            yield bound._replace(name=f"{bound.name} of /{folder.relative_to(root)}")


def _bound(folder: Path, files: _Files) -> _Bound | None:
    """Of one control group; None where it has no limit or does not account memory."""
    stat = {key: _number(value) for key, _, value in _split(folder / "memory.stat", " ")}
    limits = [(_number(_text(folder / name)), name) for name in files.limits]
    if files.inherited is not None:
        limits.append((stat.get(files.inherited), files.inherited))
    known = [(limit, name) for limit, name in limits if limit is not None]
    usage = _number(_text(folder / files.usage))
    if not known or usage is None:
        return None
    limit, name = min(known)
    cache = sum(stat.get(key) or 0 for key in files.page_cache)
    return _Bound(max(0, limit - max(0, usage - cache)), limit, name)


def _control_groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's group in each mounted hierarchy that may account memory, then those above it as far as they are
    visible."""
    paths: dict[str, str] = {}
    for number, _, rest in _split(root / "proc/self/cgroup", ":"):
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for place, _, kind in _split(root / "proc/self/mountinfo", " - "):
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in paths:
            continue
        if kinds[0] == "cgroup" and "memory" not in kinds[2].split(","):
            continue
        files = V2 if kinds[0] == "cgroup2" else V1
        mount = root / fields[4].lstrip("/")
        own = _below(PurePosixPath(paths[kinds[0]]), PurePosixPath(fields[3]))
        for folder in (own, *own.parents):
            yield mount / folder, files


def _below(path: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """The group's path from the mount point on. A path that is not below what is mounted is one as the host sees it,
    and what is mounted is then the container's own group."""
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath(".")
    return path.relative_to(mounted)


def _split(path: Path, separator: str) -> list[tuple[str, str, str]]:
    return [line.partition(separator) for line in _text(path).splitlines()]


def _text(path: Path) -> str:
    """Empty where there is no such file: another system, another version, or a group without that controller."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """None for `max`, which is no limit, and for what is not there."""
    text = text.strip()
    return int(text) if text.isdigit() else None
