"""The scripts of tests/gpu: that they say so where there is no CUDA, and that what they check can fail. Their logic
runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import (
    engine_exactness,
    load_times,
    overlap,
    poisoned_pages,
    races,
    run_all,
    seal_rate,
    slab_copy,
    trtllm_smoke,
)
from tests.gpu.bench import NO_CUDA
from tests.worker_connector.harness import Bench, engine, run, settings
from worker_connector.reference_engine.engine.config import ConnectorSpec
from worker_connector.reference_engine.models.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run `python -m tests.gpu.run_all`")
@pytest.mark.parametrize("script", ["run_all", "engine_exactness"])
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


def test_every_script_is_run_by_run_all() -> None:
    scripts = {path.stem for path in (ROOT / "tests" / "gpu").glob("*.py")} - {"__init__", "bench", "run_all"}
    assert scripts == set(run_all.LIMITS)


def _check(**options: Any) -> dict[str, int]:
    wrong: dict[str, int] = poisoned_pages.check(CPU, **{"blocks": 8, "block_bytes": 4096, "rounds": 2} | options)[
        "wrong"
    ]
    return wrong


@pytest.mark.parametrize("regions", [None, [(0, 4096)], [(0, 501), (501, 3595)]])
def test_bytes_arrive_where_they_should(regions: Any) -> None:
    assert not any(_check(regions=regions).values())


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("copy_to_pages", {"loaded_wrong", "loaded_too_late"}),
        ("copy_to_slab", {"saved_wrong"}),
    ],
)
def test_a_copy_that_does_not_happen_is_found(name: str, counts: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poisoned_pages, name, lambda *arguments: None)
    assert {what for what, number in _check(rounds=1).items() if number} == counts


def test_a_copy_to_another_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = poisoned_pages.copy_to_pages

    def shifted(stream: Any, geometry: Any, slab: Any, moves: Any) -> None:
        real(stream, geometry, slab, [move._replace(pages=((move.pages[0] + 1) % 16,)) for move in moves])

    monkeypatch.setattr(poisoned_pages, "copy_to_pages", shifted)
    assert _check(rounds=1)["written_elsewhere"]


def test_random_schedule_is_sound_and_its_books_would_find_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"pages": 12, "block_bytes": 64, "seed": 1}
    found = races.hunt(CPU, steps=60, **shape)
    assert found["blocks_copied"] > 50
    assert not any(found["wrong"].values())
    for name, where in (("copy_to_pages", "read by a pass"), ("copy_to_slab", "row in the slab")):
        with monkeypatch.context() as patched:
            patched.setattr(races, name, lambda *arguments: None)
            assert races.hunt(CPU, steps=60, **shape)["wrong"][where]


def test_engine_s_outputs_are_exact_on_the_cpu_too() -> None:
    for manager in ("v1", "v2"):
        for options in engine_exactness.variants().values() if manager == "v2" else [{}]:
            assert engine_exactness.exact(CPU, engine_exactness.SMALL_BLOCKS, manager, **options) == []
    found = engine_exactness.schedule(CPU, engine_exactness.SMALL_BLOCKS, "v2", prompts=6)
    assert (found["different"], found["faults"]) == (0, "")
    assert found["served_tokens"] > 0


def test_engine_s_outputs_would_show_a_load_that_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_connector.rank.rank.copy_to_pages", lambda *arguments: None)
    wrong = engine_exactness.exact(CPU, engine_exactness.SMALL_BLOCKS, "v2")
    assert len(wrong) == 3
    assert all("restored" in line for line in wrong)
    assert engine_exactness.schedule(CPU, engine_exactness.SMALL_BLOCKS, "v2", prompts=6)["different"]


def test_every_report_of_a_load_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in load_times.variants().values():
        assert load_times.reported(CPU, load_times.SMALL_BLOCKS, **options) == []
    found = load_times.measure(CPU, blocks=8, block_bytes=4096)
    assert load_times.judged(found, 1e6) == []
    assert load_times.judged({"plain": 0.01, "marked": 0.11, "behind": 0.09}, 0.1) == [
        "what ran before the copies counts",
        "the host waited",
    ]
    monkeypatch.setattr("worker_connector.memory.copy_stream._Moment.seconds_since", lambda *_: 0.0)
    assert len(load_times.reported(CPU, load_times.SMALL_BLOCKS)) == 2
    assert load_times.judged(load_times.measure(CPU, blocks=8, block_bytes=4096), 1e6) == ["the marks tell no time"]


def test_measurements_have_their_numbers() -> None:
    found = slab_copy.measure(CPU, total=32 * 1024, block_bytes=4096, rounds=1)
    assert set(found["ratio_to_plain"]) == {"neighbours", "scattered"}
    ratio, where = slab_copy.worst({"4 KiB": found})
    assert 0 < ratio == min(ratio for ways in found["ratio_to_plain"].values() for ratio in ways.values())
    assert where.startswith("4 KiB, ")
    hidden = overlap.measure(CPU, blocks=8, block_bytes=4096, rank=16, rounds=1)
    assert set(hidden["hidden"]) == {"load", "save"}
    assert all(time > 0 for times in hidden["seconds"].values() for time in times.values())
    waits = overlap.engine_waits(CPU, blocks=8, block_bytes=4096, rounds=1)
    assert 0 < waits["next_pass_ms"] <= waits["save_ms"]
    rates = seal_rate.measure(CPU, blocks=8, block_bytes=4096, seconds=0.01)
    assert all(rate > 0 for rates in rates["gb_per_s"].values() for rate in rates.values())


@pytest.mark.parametrize(
    ("program", "verdict", "note"),
    [
        ("import json; print(json.dumps({'passed': True}))", "passed", ""),
        (
            "import json; print(json.dumps({'passed': False, 'unsound': ['a', 'b']})); raise SystemExit(1)",
            "failed",
            "unsound: a, b",
        ),
        (
            "raise RuntimeError('CUDA error: an illegal memory access')",
            "failed",
            "RuntimeError: CUDA error: an illegal memory access",
        ),
        ("print('not json')", "failed", "exit status 0"),
        ("import sys; print('no such library', file=sys.stderr); raise SystemExit(3)", "not run", "no such library"),
        ("import time; time.sleep(60)", "failed", "not done after 1 s"),
    ],
)
def test_one_script_s_end_is_told(program: str, verdict: str, note: str, tmp_path: Path) -> None:
    ran = run_all.run("overlap", 1 if "sleep" in program else 60, [sys.executable, "-c", program])
    assert (ran.verdict, ran.note) == (verdict, note)
    run_all.keep([ran], tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["overlap"]["verdict"] == verdict
    assert verdict in run_all.table([ran])


class OnReferenceEngine:
    """The reference engine as a subject of trtllm_smoke.py."""

    tokens_per_block = 32

    def __init__(self, kind: str) -> None:
        self._bench = Bench(settings()) if kind == "semkv" else None
        spec = ConnectorSpec(trtllm_smoke.NoOpScheduler, trtllm_smoke.NoOpWorker) if kind == "no-op" else None
        self._context = engine(self._bench, spec=spec)
        self._engine = self._context.__enter__()

    def generate(self, tokens: Sequence[int], max_new_tokens: int) -> trtllm_smoke.Answer:
        sampling = SamplingParams(return_generation_logits=True)
        _, found = run(self._engine, tokens, max_new_tokens=max_new_tokens, sampling=sampling)
        return trtllm_smoke.Answer(found.token_ids, torch.stack(found.stats.generation_logits))

    def overrun_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def served_tokens(self) -> int:
        assert self._bench is not None
        return int(self._bench.schedulers[0].snapshot()["attempt_counts"].get("confirmed_tokens", 0))

    def close(self) -> None:
        self._context.__exit__(None, None, None)


PROMPTS = [[n * factor % 250 for n in range(length)] for length, factor in ((40, 7), (200, 11))]


def test_smoke_s_logic_on_the_reference_engine() -> None:
    found = trtllm_smoke.compare(OnReferenceEngine, PROMPTS)
    assert found == {"prompts": 2, "served_tokens": 32 + 192, "wrong": []}


@pytest.mark.parametrize("fault", ["tokens", "logits", "nothing served", "no-op"])
def test_smoke_s_logic_finds_what_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(OnReferenceEngine):
        def __init__(self, kind: str) -> None:
            super().__init__(kind)
            self._kind = kind
            self._overrun = False

        def overrun_cache(self) -> None:
            self._overrun = fault != "nothing served"
            if self._overrun:
                super().overrun_cache()

        def generate(self, tokens: Sequence[int], max_new_tokens: int) -> trtllm_smoke.Answer:
            answer = super().generate(tokens, max_new_tokens)
            assert answer.logits is not None
            if fault == "logits" and self._overrun:
                answer.logits[1, 3] += 1e-6
            if (fault == "tokens" and self._overrun) or (fault == "no-op" and self._kind == "no-op"):
                answer.token_ids[-1] += 1
            return answer

    expected = {
        "tokens": "restored differs from the engine without a connector",
        "logits": "logits of restored are not those of warm",
        "nothing served": "nothing was served from the slab",
        "no-op": "a connector that does nothing changes the output",
    }[fault]
    wrong = trtllm_smoke.compare(Faulty, PROMPTS[1:])["wrong"]
    assert [expected in line for line in wrong] == [True]
