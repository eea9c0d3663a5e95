"""Numbers that are each allowed and cannot fit together are told by check-config."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_semkv.cli import main
from dynamo_semkv.config.load import build, load_config


def test_the_defaults_fit_together() -> None:
    assert load_config().warnings == ()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"bus": {"stream_max_bytes": 1048576}}, "bus.stream_max_bytes is 1048576"),
        ({"connector": {"max_donors": 200_000}}, "evidence.fingerprint.max_donors is 100000"),
        ({"bus": {"max_buffered_bytes": 1024}}, "bus.max_buffered_bytes is 1024"),
        ({"connector": {"announce_interval_seconds": 7200}}, "evidence.max_donor_age is 10800"),
    ],
)
def test_what_cannot_fit_is_said_with_both_numbers(
    values: dict[str, dict[str, int]], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(values)  # it is no error
    file = tmp_path / "semkv.yaml"
    ((section, fields),) = values.items()
    ((field, value),) = fields.items()
    file.write_text(f"{section}: {{{field}: {value}}}\n")
    assert main(["check-config", str(file)]) == 0
    assert says in capsys.readouterr().err
