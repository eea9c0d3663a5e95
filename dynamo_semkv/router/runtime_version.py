"""Which Dynamo this was written against and tested with, and what the operator is told of another. Pure but for reading
what is installed."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTION = "ai-dynamo-runtime"
OLDEST, NEWEST = (1, 6, 1), (1, 6)
"""The first release that has what the edge calls, and the minor release that is tested: later patches of it are
expected to work."""


def installed() -> str | None:
    """The version of Dynamo's runtime; None where it came without its metadata (an image that was built from
    source)."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def verdict(version: str | None) -> tuple[bool, str | None]:
    """(may it serve, what to tell the operator). An older runtime lacks calls that requests need; a newer one may have
    changed them."""
    supported = f"tested with {'.'.join(map(str, OLDEST))} and meant for {'.'.join(map(str, NEWEST))}.x"
    if version is None:
        return True, f"{DISTRIBUTION} is there without a version; this release is {supported}"
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return True, f"{DISTRIBUTION} {version} is no version that can be read; this release is {supported}"
    parts = tuple(int(part or 0) for part in found.groups())
    if parts < OLDEST:
        return (
            False,
            f"{DISTRIBUTION} {version} is too old: this release is {supported}. Remedy: pip install "
            f"{DISTRIBUTION}==1.6.1",
        )
    if parts[:2] > NEWEST:
        return (
            True,
            f"{DISTRIBUTION} {version} is newer than what this release knows ({supported}); watch /readyz and the log",
        )
    return True, None
