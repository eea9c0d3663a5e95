"""What `status` says of where its figures come from."""

from __future__ import annotations

import io

from rich.console import Console

from dynamo_semkv.cli.sources_view import sources
from dynamo_semkv.observe.snapshot import build_snapshot
from tests.observe.fake_state import fake_calibration, fake_state


def shown(calibration: dict[str, object]) -> str:
    console = Console(width=400, file=io.StringIO())
    for part in sources(build_snapshot(fake_state(calibration=calibration))):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_replicas_whose_load_times_are_not_believed_are_named() -> None:
    known = fake_calibration()
    assert "not believed" not in shown(known)
    assert "came later than they say: w-odd/3." in shown({**known, "clocks_not_believed": ["w-odd/3"]})
