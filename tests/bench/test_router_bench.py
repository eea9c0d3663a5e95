"""The router's bench runs, and what it runs is the real path: requests are placed, hinted, recorded, and nothing falls
back. No timing."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import pytest

from dynamo_semkv.bench.router.__main__ import WIDTH, main
from dynamo_semkv.bench.router.scene import Scene


def test_the_scene_is_a_router_that_places_what_has_a_donor_and_nothing_else() -> None:
    scene = Scene(donors=20, tokens=1_024, replicas=6)

    async def ten() -> None:
        for number in range(10):
            await scene.handle(number, scene.request(number))

    try:
        asyncio.run(ten())
    finally:
        scene.close()
    assert (scene.record.opens, scene.record.ends, scene.record.placed) == (10, 10, 5)
    assert scene.fallbacks.counts == {}
    assert scene.records.open_routes == 0


def test_the_command_reports_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--part", "stages", "decisions", "--tokens", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in found["stages"]] == [
        "read",
        "exact",
        "lookup",
        "weigh",
        "hint and record",
        "whole",
    ]
    assert [row["replicas"] for row in found["decisions"]] == [1, 32]
    assert all(row["own_p50"] <= row["own_p99"] for row in found["stages"])


@pytest.mark.graph
def test_every_router_serves_through_real_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """A mocker, two frontends, a bare router and ours; tables fit 80 columns."""
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("ai-dynamo is not installed")
    few = ["--tokens", "256", "--concurrency", "2", "--max-tokens", "3", "--graph-ranks", "2"]
    assert main(["--quick", "--part", "throughput", *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    for name in ("Dynamo (Rust)", "bare Python", "dynamo_semkv"):
        (row,) = [line for line in lines if line.strip().startswith(name)]
        served, *_, failed = row.replace(name, "").split()
        assert float(served) > 0.0, row
        assert failed == "0", row


def test_its_tables_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--part", "stages", "decisions", "--tokens", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in "".join(lines)
