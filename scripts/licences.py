"""Prints the licences of what a deployment installs with us, from the installed packages' own metadata: `python
scripts/licences.py`.

It covers the closure of the core and the extras router, connector, telemetry and embeddings. It exits with 1 if a
licence is missing, or asks more of whoever ships the package than to name it.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = ("router", "connector", "telemetry", "embeddings")
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|Affero|SSPL|EUPL|Lesser General|General Public)", re.IGNORECASE)


def requirements(extras: tuple[str, ...]) -> list[Requirement]:
    """What the project itself asks for, with these extras."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != PROJECT["name"]]


def closure(wanted: list[Requirement]) -> set[str]:
    """Names of the installed packages that these need, directly or not; a package that is not installed here is not
    needed on this platform."""
    found: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if name in found or not applies:
            continue
        try:
            more = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            print(f"{name}: not installed", file=sys.stderr)
            continue
        found.add(name)
        for inner in map(Requirement, more):
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(Requirement(str(inner).partition(";")[0]))
    return found


def licence(name: str) -> str:
    """The package's licence as its metadata has it; empty if it has none."""
    found = metadata.metadata(name)
    for field in ("License-Expression", "License"):
        value = " ".join(" ".join(found.get_all(field) or []).split())
        if value and value.upper() != "UNKNOWN" and len(value) < 60:
            return value
    named = [text.rpartition(" :: ")[2] for text in found.get_all("Classifier") or [] if text.startswith("License ::")]
    return ", ".join(named)


def main() -> int:
    """Prints a line for each package; returns 1 if a licence must be looked at."""
    bad = []
    for name in sorted(closure(requirements(EXTRAS))):
        text = licence(name)
        print(f"{name:<44} {metadata.version(name):<16} {text or '?'}")
        if not text or COPYLEFT.search(text):
            bad.append(name)
    if bad:
        print(f"to be looked at: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
