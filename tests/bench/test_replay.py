"""The replay: traces are read or refused, the cost model adds up, and placement converges to the oracle or to Dynamo's
own choices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.bench.replay.__main__ import COLUMNS, WIDTH, main
from dynamo_semkv.bench.replay.policies import DynamoKv, Greedy, RoundRobin, Semkv
from dynamo_semkv.bench.replay.replica import Blocks, SimulatedReplica
from dynamo_semkv.bench.replay.run import ENGINES, SLOW_COST, Figures, Fleet, compare, lying, materializing, replay
from dynamo_semkv.bench.replay.trace import TraceRequest, read_mooncake, repeated_share, synthetic
from dynamo_semkv.config.load import build
from dynamo_semkv.contracts.errors import ContractError

FLEET = Fleet(replicas=4, device_blocks=300, host_blocks=4_000)
TRACE = synthetic(1_500, seed=3, documents=200, rate=2.0)
CONFIG = build({})


DEAF = build({"scoring": {"calibration": {"enabled": False}}})
"""Nothing is learned: the prior, which is the truth of an engine that materializes everything, counts for ever."""


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, bool], dict[str, Figures]]:
    both = [(engine, sees) for engine in ("materializes", "declines") for sees in (True, False)]
    return {
        (engine, sees): {
            row.policy: row
            for row in compare(TRACE, FLEET, CONFIG, engine=engine, index_sees_host=sees, hindsight_steps=8)
        }
        for engine, sees in [*both, *((engine, False) for engine in ENGINES[2:])]
    }


def test_nobody_beats_the_oracle(figures) -> None:
    """It has the whole trace in view and begins with the best plan of all policies."""
    for key, rows in figures.items():
        assert min(row.regret for row in rows.values()) > -1e-9, key
    greedy = Greedy(materializes=materializing("half", FLEET.replicas))
    results, _ = replay(TRACE, greedy, FLEET, materializing("half", FLEET.replicas))
    mean = sum(served.ttft for served in results) / len(results)
    assert figures["half", False]["oracle"].mean_ttft < mean, "hindsight is worth something"


@pytest.mark.parametrize(("engine", "gain"), [("declines", 0.02), ("half", 0.03), ("slow", 0.1), ("lies", 0.08)])
def test_placement_without_learning_is_worse_where_the_engine_differs_from_the_prior(
    engine: str, gain: float, figures
) -> None:
    learned = figures[engine, False]["semkv"]
    rows = compare(TRACE, FLEET, DEAF, engine=engine, index_sees_host=False, hindsight_steps=0)
    deaf = next(row for row in rows if row.policy == "semkv")
    assert learned.mean_ttft < (1 - gain) * deaf.mean_ttft
    assert learned.late_mean_ttft < (1 - gain) * deaf.late_mean_ttft


def test_an_engine_that_lies_about_its_loads_is_found_out_by_its_first_tokens() -> None:
    """What a load took is the worker's own word, as long as the first token that the router saw bears it out
    (docs/placement.md)."""
    lies = lying("lies", FLEET.replicas)
    policy = Semkv(FLEET.replicas, CONFIG, DynamoKv(index_sees_host=False), index_sees_host=False)
    placed = _Where(policy)
    replay(TRACE, placed, FLEET, materializing("lies", FLEET.replicas), lies)
    found = policy.calibration.snapshot()["clocks_not_believed"]
    assert sorted(found) == [f"worker-{n}/0" for n, lying_one in enumerate(lies) if lying_one]
    late = [lies[index] for number, index in placed.at.items() if number >= TRACE[len(TRACE) // 2].number]
    assert len(late) > 0.05 * len(TRACE)
    assert not any(late), "nothing is placed on them any more"


class _Where:
    """A policy, and where it placed which request."""

    name = "semkv"

    def __init__(self, policy: Semkv) -> None:
        self.at: dict[int, int] = {}
        self._policy = policy
        self.served = policy.served

    def choose(self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float) -> int:
        index = self._policy.choose(request, replicas, now)
        if self._policy.placed and self._policy.placed[-1] == request.number:
            self.at[request.number] = index
        return index


def test_with_an_engine_that_materializes_placement_comes_close_to_the_oracle(figures) -> None:
    for sees in (True, False):
        rows = figures["materializes", sees]
        assert rows["semkv"].regret < 0.05
        assert rows["semkv"].confirmed_share > 0.9 * rows["oracle"].confirmed_share
    hidden = figures["materializes", False]
    assert hidden["Dynamo kv"].regret > 0.15, "donors must be worth something here, or this shows nothing"
    assert hidden["semkv"].mean_ttft < 0.9 * hidden["Dynamo kv"].mean_ttft


def test_with_an_engine_that_declines_everything_placement_returns_to_dynamo(figures) -> None:
    for sees in (True, False):
        rows = figures["declines", sees]
        assert rows["semkv"].confirmed_share == 0.0
        assert rows["semkv"].mean_ttft < 1.03 * rows["Dynamo kv"].mean_ttft
        assert rows["semkv"].late_mean_ttft < 1.03 * rows["Dynamo kv"].late_mean_ttft
        assert rows["semkv"].load_spread < rows["Dynamo kv"].load_spread + 0.1
        able = figures["materializes", sees]["semkv"]
        assert rows["semkv"].placed < able.placed / 2
        assert rows["semkv"].placed_late < 0.1 * len(TRACE) / 10


def test_where_loading_costs_more_than_computing_placement_learns_to_stop(figures) -> None:
    rows = figures["slow", False]
    assert rows["Dynamo kv"].regret > 0.0, "the oracle knows what loads cost"
    assert rows["semkv"].placed < 0.02 * len(TRACE)
    assert rows["semkv"].placed_late == 0
    assert rows["semkv"].mean_ttft < 1.05 * rows["Dynamo kv"].mean_ttft
    policy = Semkv(FLEET.replicas, DEAF, DynamoKv(index_sees_host=False), index_sees_host=False)
    results, _ = replay(TRACE, policy, replace(FLEET, host_cost=SLOW_COST), [True] * FLEET.replicas)
    assert len(policy.placed) > 10 * rows["semkv"].placed, "without learning it would go on"
    assert sum(served.ttft for served in results) / len(results) > rows["semkv"].mean_ttft


def test_load_is_spread_whatever_the_policy(figures) -> None:
    assert all(row.load_spread < 0.5 for rows in figures.values() for row in rows.values())


def test_half_of_the_fleet_declining_is_learned_per_replica() -> None:
    able = materializing("half", FLEET.replicas)
    policy = Semkv(FLEET.replicas, CONFIG, DynamoKv(index_sees_host=False), index_sees_host=False)
    replay(TRACE, policy, FLEET, able)
    shares: dict[bool, list[float]] = {True: [], False: []}
    for row in policy.calibration.snapshot()["cells"]:
        if row["trials"] >= 3.0:
            shares[able[int(row["replica"].removeprefix("worker-").removesuffix("/0"))]].append(row["share"])
    assert min(shares[True]) > 0.6 > max(shares[False])


@given(st.lists(st.lists(st.integers(0, 30), max_size=6, unique=True), max_size=40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_token_is_reused_loaded_or_computed_and_nothing_runs_before_its_time(chains, materializes) -> None:
    trace = [TraceRequest(n, n * 0.01, tuple(chain), len(chain) * 16 + 5) for n, chain in enumerate(chains)]
    fleet = Fleet(replicas=3, block_tokens=16, device_blocks=8, host_blocks=20, rate=500.0)
    results, replicas = replay(trace, RoundRobin(), fleet, [materializes] * 3)
    for request, served in zip(trace, results, strict=True):
        assert served.device_tokens + served.confirmed + served.computed == request.tokens
        assert served.confirmed == (served.host_tokens if materializes else 0)
        assert served.computed >= 1
        assert served.start >= request.at
        assert served.end > served.start
    assert sum(replica.computed_tokens for replica in replicas) == sum(served.computed for served in results)


def test_blocks_leave_leaf_first_and_the_unused_first() -> None:
    blocks = Blocks(4)
    blocks.touch((1, 2, 3))
    blocks.touch((1, 9))
    assert (blocks.prefix((1, 2, 3)), blocks.prefix((1, 9))) == (3, 2)
    blocks.touch((5,))
    assert (blocks.prefix((1, 2, 3)), blocks.prefix((1, 9))) == (2, 2)


def test_what_runs_now_is_not_cached_yet() -> None:
    replica = SimulatedReplica(16, 100.0, 0.25, Blocks(10), Blocks(10))
    first = replica.serve((1, 2), 40, 0.0, materializes=True)
    replica.settle(first.end - 0.01)
    assert replica.overlap((1, 2)) == (0, 0)
    replica.settle(first.end)
    assert replica.overlap((1, 2)) == (2, 0)


def test_a_mooncake_trace_is_read_scaled_and_timed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3_000, "input_length": 1_536, "output_length": 5, "hash_ids": [0, 1, 7]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = read_mooncake(path, scale=32, speed=2.0)
    assert (one.chain, one.tokens, one.at) == ((0, 1), 34, 0.0)  # the third block is not full
    assert (two.chain, two.tokens, two.at) == ((0, 1, 7), 48, 1.5)
    assert repeated_share([one, two]) == pytest.approx(2 / 5)
    assert len(read_mooncake(path, limit=1)) == 1


@pytest.mark.parametrize(
    "line", ["{", '{"timestamp": 0}', '{"timestamp": 0, "input_length": "x", "hash_ids": []}', "[]"]
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(ContractError, match="line 2"):
        read_mooncake(path)


@pytest.mark.parametrize(("options", "field"), [({"scale": 3}, "scale"), ({"speed": 0.0}, "speed")])
def test_bad_options_are_named(tmp_path: Path, options: dict[str, float], field: str) -> None:
    with pytest.raises(ContractError, match=field):
        read_mooncake(tmp_path / "trace.jsonl", **options)


def test_the_command_prints_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "60", "--engine", "half", "--replicas", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["half"]
    assert [row["policy"] for row in rows] == ["round robin", "Dynamo kv", "semkv", "oracle"]
    assert all(row["requests"] == 60 for row in rows)


def test_tables_fit_eighty_columns_through_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # what a shell says of its own window is no matter for a pipe
    assert main(["--requests", "60", "--engine", "half", "--replicas", "2", "--rate", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    (header,) = [line.split() for line in lines if line.split()[:1] == ["policy"]]
    assert tuple(header) == COLUMNS
    row = next(line.split() for line in lines if line.strip().startswith("oracle"))
    assert len(row) == len(COLUMNS)
    assert "…" not in "".join(lines)
