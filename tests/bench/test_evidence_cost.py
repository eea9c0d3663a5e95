"""The cost bench runs, and what it measured it measured on right answers."""

from __future__ import annotations

import pytest

from dynamo_semkv.bench.evidence_cost import main, measure


def test_a_small_run_measures_everything_on_right_answers() -> None:
    cost = measure(40, 1_024, lookups=10)
    assert (cost.donors, cost.tokens) == (40, 1_024)
    assert cost.right == 1.0
    assert cost.false_matches == 0
    assert 0.0 < cost.hit_p50 <= cost.hit_p99
    assert 0.0 < cost.miss_p50 <= cost.miss_p99
    assert cost.matches == 8.0, "donors of one family"
    assert min(cost.registers_per_second, cost.moves_per_second, cost.evictions_per_second) > 0.0
    assert cost.longest_own > 0.0
    assert cost.posting_bytes_per_donor > 0.0
    assert 0.0 < cost.beside_p50 <= cost.beside_p99 <= cost.beside_max
    assert 0.0 < cost.stall_p99 <= cost.stall_max


def test_the_command_prints_a_line_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--donors", "5", "10", "--tokens", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["5", "10"]
