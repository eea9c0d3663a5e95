"""The scorer that docs/writing-a-scorer.md shows is run as it stands there: imported by its name, beside ours in the
sheet."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from dynamo_semkv.config.load import build
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.router.plugins import plugged_scorers
from dynamo_semkv.scoring.choose import ScoreSheet, choose
from dynamo_semkv.scoring.replica_view import ReplicaView
from dynamo_semkv.testing import ManualClock

DOC = Path(__file__).resolve().parents[2] / "docs" / "writing-a-scorer.md"
A, B = ReplicaKey(1, 0), ReplicaKey(2, 0)
PROMPT = 1_000


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    (tmp_path / "my_scorers.py").write_text("from __future__ import annotations\n" + code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_scorers", raising=False)


def sheet(*views: ReplicaView) -> ScoreSheet:
    (text,) = blocks("yaml")
    config = build(yaml.safe_load(text))
    faults: list[BaseException] = []
    found = choose(views, [], PROMPT, config.scoring, b"s", None, plugged_scorers(config, faults.append, ManualClock()))
    assert not faults
    return found


@pytest.mark.parametrize(("used", "tokens"), [(0, 0), (80, 0), (90, -500), (99, -950)])
def test_it_costs_a_full_replica_and_no_other(module: None, used: int, tokens: int) -> None:
    found = sheet(
        ReplicaView(A, device_tokens=100, active_decode_blocks=used, total_blocks=100), ReplicaView(B, device_tokens=90)
    )
    (row,) = (row for row in found.rows if row.replica == A)
    assert row.part("headroom").value == pytest.approx(tokens)
    assert row.part("headroom").share == pytest.approx(-tokens / PROMPT)
    assert row.total == pytest.approx(100 + tokens)
    assert row.evidence == 0
    assert found.best is not None
    assert found.best.replica == (A if tokens == 0 else B)


def test_the_example_is_about_forty_lines_at_the_most() -> None:
    assert len(blocks("python")[0].splitlines()) <= 40
