"""Keeps what a release reads and writes, so that later ones are tested beside it: `python scripts/keep_release.py REF NAME`.

Writes tests/contracts/releases/NAME.zip with the packages of that commit that speak on the bus. Tests import it in a process of its
own, so they need no history (a checkout of CI has none). The same commit gives the same bytes.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "contracts" / "releases"
PARTS = ("__init__.py", "bus", "config", "contracts", "evidence", "outcome")
"""Of dynamo_semkv: the wire itself, and what publishes, reads and joins it."""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def keep(ref: str, target: Path) -> None:
    commit = git("rev-parse", f"{ref}^{{commit}}").decode().strip()
    archive = git("archive", "--format=tar", commit, *(f"dynamo_semkv/{part}" for part in PARTS))
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as sources,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept,
    ):
        members = {member.name: member for member in sources.getmembers() if member.isfile()}
        for name in sorted(members):
            source = sources.extractfile(members[name])
            assert source is not None
            kept.writestr(zipfile.ZipInfo(name), source.read(), zipfile.ZIP_DEFLATED)
        kept.writestr(zipfile.ZipInfo("RELEASE"), f"{commit}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", metavar="REF", help="a tag or commit")
    parser.add_argument("name", metavar="NAME", help="what the release is called, e.g. 0.1.0")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    keep(arguments.ref, FOLDER / f"{arguments.name}.zip")


if __name__ == "__main__":
    main()
