"""Keeps a release, so that later ones are tested beside it: `python scripts/keep_release.py REF NAME`.

Writes tests/contracts/releases/NAME.zip with the packages of that commit. Tests run its routers, workers and codecs in
processes of their own, so they need no history (a checkout of CI has none). The same commit gives the same bytes.
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
PARTS = ("dynamo_semkv", "worker_connector")
LEFT_OUT = ("dynamo_semkv/bench/", "worker_connector/bench/")
"""What no router or worker runs."""


def git(*arguments: str) -> bytes:
    """What a git command prints; CalledProcessError if it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def keep(ref: str, target: Path) -> None:
    """Writes the packages of the commit that `ref` names into the zip file `target`."""
    commit = git("rev-parse", f"{ref}^{{commit}}").decode().strip()
    archive = git("archive", "--format=tar", commit, *PARTS)
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as sources,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept,
    ):
        members = {member.name: member for member in sources.getmembers() if member.isfile()}
        for name in sorted(name for name in members if not name.startswith(LEFT_OUT)):
            source = sources.extractfile(members[name])
            assert source is not None
            kept.writestr(zipfile.ZipInfo(name), source.read(), zipfile.ZIP_DEFLATED)
        kept.writestr(zipfile.ZipInfo("RELEASE"), f"{commit}\n")


def main() -> None:
    """Keeps the release that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", metavar="REF", help="a tag or commit")
    parser.add_argument("name", metavar="NAME", help="what the release is called, e.g. 0.1.0")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    keep(arguments.ref, FOLDER / f"{arguments.name}.zip")


if __name__ == "__main__":
    main()
