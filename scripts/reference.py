"""Writes docs/reference/*.md; with --check it says which are not current, and exits with 1. `make docs` runs it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import reference_cli
import reference_config
import reference_wire

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES = {"cli.md": reference_cli.page, "config.md": reference_config.page, "wire.md": reference_wire.page}


def main() -> int:
    """Writes or checks the pages; returns 1 if --check found a stale one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if arguments.check:
            stale += [name] if not path.exists() or path.read_text() != text else []
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"docs/reference/{name} is not current: run `python scripts/reference.py`, or `make docs`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
