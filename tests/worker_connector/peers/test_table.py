"""README.md of this folder names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_is_there() -> None:
    file: Path | None = None
    missing: list[str] = []
    found = 0
    for name in re.findall(r"`([^`]+)`", (HERE / "README.md").read_text(encoding="utf-8")):
        path, separator, test = name.partition("::")
        if path.endswith(".py") and not path.startswith("tests/"):
            file = next((at / path for at in (HERE, HERE.parent) if (at / path).is_file()), None)
            missing += [] if file is not None else [name]
        if separator and file is not None:
            found += 1
            missing += [] if f"def {test}(" in file.read_text(encoding="utf-8") else [name]
    assert not missing
    assert found > 30
