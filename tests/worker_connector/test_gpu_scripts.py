"""The scripts of tests/gpu: that they say so where there is no CUDA, and that what they check can fail. Their logic runs on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import overlap, poisoned_pages, slab_copy
from tests.gpu.bench import NO_CUDA

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("script", ["slab_copy", "poisoned_pages", "overlap"])
def test_without_cuda_a_script_ends_with_a_clear_message(script: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{script}"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (NO_CUDA, "")
    assert "no CUDA here" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_bytes_arrive_where_they_should() -> None:
    found = poisoned_pages.check(CPU, blocks=8, block_bytes=4096, rounds=3, delay=4)
    assert not any(found["wrong"].values()), found


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("copy_to_pages", {"loaded_wrong", "loaded_too_late"}),
        ("copy_to_slab", {"saved_too_early", "loaded_wrong", "loaded_too_late"}),
    ],
)
def test_a_copy_that_does_not_happen_is_found(name: str, counts: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poisoned_pages, name, lambda *arguments: None)
    found = poisoned_pages.check(CPU, blocks=8, block_bytes=4096, rounds=1, delay=4)
    assert {what for what, number in found["wrong"].items() if number} == counts


def test_a_copy_to_another_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = poisoned_pages.copy_to_pages

    def shifted(stream: Any, geometry: Any, slab: Any, moves: Any) -> None:
        real(stream, geometry, slab, [move._replace(pages=((move.pages[0] + 1) % 16,)) for move in moves])

    monkeypatch.setattr(poisoned_pages, "copy_to_pages", shifted)
    found = poisoned_pages.check(CPU, blocks=8, block_bytes=4096, rounds=1, delay=4)
    assert found["wrong"]["written_elsewhere"]


def test_measurements_have_their_numbers() -> None:
    found = slab_copy.measure(CPU, blocks=8, block_bytes=4096, rounds=1)
    assert set(found["ratio_to_plain"]) == {"neighbours", "scattered"}
    assert all(ratio > 0 for ways in found["ratio_to_plain"].values() for ratio in ways.values())
    hidden = overlap.measure(CPU, blocks=8, block_bytes=4096, rank=16, rounds=1)
    assert set(hidden["hidden"]) == {"load", "save"}
    assert all(time > 0 for times in hidden["seconds"].values() for time in times.values())
