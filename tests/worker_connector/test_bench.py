"""worker_connector.bench: that each part measures what it says, on sizes that take no time. No figure is judged
here."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from worker_connector.bench import __main__ as bench
from worker_connector.bench import copying, lookup, pulling, throughput
from worker_connector.bench.rig import Rig, quantile, random_tokens
from worker_connector.fetch.export import SlabExport


def test_questions_are_answered_from_resident_blocks() -> None:
    """`measure` itself compares every answer with what is resident, so that it cannot time a miss."""
    as_array, as_list = lookup.measure(256, 2, row_bytes=4_096, questions=6)
    assert (as_array.tokens_as, as_list.tokens_as) == ("array", "list")
    for cost in (as_array, as_list):
        assert (cost.tokens, cost.resident_prompts) == (256, 2)
        assert 0 < cost.p50 <= cost.p99


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "serve", lambda self, tokens: None)
    with pytest.raises(RuntimeError, match="was offered 0, not 224"):
        lookup.measure(256, 1, row_bytes=4_096, questions=2)


def test_rig_leaves_nothing_behind_a_question() -> None:
    rig = Rig(row_bytes=4_096, blocks=20, longest_prompt=256)
    rig.serve(random_tokens(256, 0))
    request = rig.request(random_tokens(256, 0))
    assert rig.ask(request) == 224
    assert rig.scheduler.snapshot()["leases"] == 1
    rig.forget(request)
    numbers = rig.scheduler.snapshot()
    assert (numbers["leases"], numbers["attempts"], numbers["faults"]) == (0, 0, {})
    rig.close()


def test_copies_have_ratios_for_both_patterns_and_ways() -> None:
    rates = copying.measure(torch.device("cpu"), 4_096, total=64 * 1024, rounds=1)
    assert [rate.pattern for rate in rates] == ["neighbours", "scattered"]
    assert all(min(rate.plain_gb_per_s, rate.load_ratio, rate.save_ratio) > 0 for rate in rates)


def test_a_pull_is_timed_only_where_every_block_came(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = pulling.measure(4_096, total=64 * 1024, rounds=1)
    assert rate.block_bytes == 4_096
    assert min(rate.mib_per_s, rate.mib_per_cpu_s, rate.ratio) > 0
    monkeypatch.setattr(SlabExport, "read", lambda self, wanted, key, into: None)
    with pytest.raises(RuntimeError, match="ended after 0 of 16 blocks"):
        pulling.measure(4_096, total=64 * 1024, rounds=1)


def test_what_is_cold_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain copy whose first rounds are slow (cold pages, threads that start) must not make ours look fast."""
    calls = 0

    def seconds(work: Callable[[], object], device: torch.device) -> float:
        nonlocal calls
        calls += 1
        plain = calls % 3 == 1
        return 100.0 if plain and calls <= 3 * copying.WARM_UP else 1.0

    monkeypatch.setattr(copying, "_seconds", seconds)
    first, second = copying.measure(torch.device("cpu"), 4_096, total=64 * 1024, rounds=1)
    assert (first.load_ratio, first.save_ratio, second.load_ratio, second.save_ratio) == (1.0, 1.0, 1.0, 1.0)
    assert copying.WARM_UP >= 2


def test_throughput_is_of_an_engine_that_really_saves() -> None:
    prefill, decode = throughput.measure("tiny", rounds=1, prompt_tokens=64, generated=40, batch=2)
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert prefill.saved_blocks == 2 * 2 * 2  # two blocks of each of two prompts, in two slices
    assert decode.saved_blocks > 0
    assert all(min(t.tokens_per_second, t.ratio, t.cpu_ratio, t.engine_ratio) > 0 for t in (prefill, decode))


@pytest.mark.parametrize(("number", "order"), [(0, "baab"), (1, "abba")])
def test_both_engines_have_the_same_share_of_a_round(monkeypatch: pytest.MonkeyPatch, number: int, order: str) -> None:
    """A machine that grows slower from slice to slice makes neither of them look slow."""
    seen: list[str] = []

    def run(self: Any, engine: str, phase: str) -> throughput._Took:
        seen.append(engine)
        return throughput._Took(*(len(seen) * factor for factor in (1.0, 2.0, 3.0)))

    monkeypatch.setattr(throughput._Work, "run", run)
    work: Any = throughput._Work(64, 40, 2)
    assert work.round("a", "b", "decode", number) == ((5.0, 10.0, 15.0), (5.0, 10.0, 15.0))
    assert "".join(seen) == order


def test_the_garbage_collector_is_put_back() -> None:
    before = gc.get_threshold()
    with throughput._engine_gc():
        assert gc.get_threshold()[0] == throughput.GC_THRESHOLD
    assert gc.get_threshold() == before


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_quantile(share: float, expected: int) -> None:
    assert quantile(list(range(100, 0, -1)), share) == expected


def test_table_and_json_tell_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench,
        "_measure",
        lambda part, quick, device: copying.measure(torch.device("cpu"), 4_096, total=8_192, rounds=1),
    )
    assert bench.main(["copy"]) == 0
    assert "neighbours" in capsys.readouterr().out
    assert bench.main(["copy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goals"]["copy_ratio"] == copying.GOAL
    assert [row["pattern"] for row in found["copy"]] == ["neighbours", "scattered"]
    with pytest.raises(SystemExit):
        bench.main(["copies"])
    assert "lookup, copy, throughput" in capsys.readouterr().err
