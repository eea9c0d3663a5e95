"""Donors of the device tier live and die by the engine's own events; donors of our tiers do not, and nothing is offered
because of one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.worker_connector.harness import MIB, Bench, engine, off_settings, prompt, run, settings, wait_for
from tests.worker_connector.scripted import OPTIONS, ScriptedEngine, llm_args
from tests.worker_connector.scripted_disk import donors
from worker_connector.connector import observe_kv_events
from worker_connector.donors import device_events
from worker_connector.donors.kv_event_registry import listen
from worker_connector.leader.leader import Leader

SIZE = 4
TOKENS = list(range(40))


class Cache:
    """An engine's event stream. Hashes are as wide as real ones, and negative where the wire makes them so."""

    def __init__(self, leader: Leader, *, first: int = 0, spelling: str = "unsigned", **fields: Any) -> None:
        self.leader = leader
        self.number = first
        self.spelling = spelling
        self.fields = {"window_size": 4096} | fields

    def name(self, tokens: Sequence[int]) -> Any:
        value = hash(("block", tuple(tokens))) & (2**64 - 1) | 1 << 63
        return {"unsigned": value, "signed": value - 2**64, "hex": f"{value:016x}"}[self.spelling]

    def send(self, data: dict[str, Any], **fields: Any) -> None:
        self.leader.kv_events([{"event_id": self.number, "data": data} | self.fields | fields])
        self.number += 1

    def stored(self, tokens: Sequence[int], first: int = 0, **block: Any) -> None:
        """Whole blocks from `first` on."""
        ends = range((first + 1) * SIZE, len(tokens) + 1, SIZE)
        self.send(
            {
                "type": "stored",
                "parent_hash": self.name(tokens[: first * SIZE]) if first else None,
                "blocks": [
                    {
                        "block_hash": self.name(tokens[:end]),
                        "tokens": [{"token_id": token, "token_extra_id": 0} for token in tokens[end - SIZE : end]],
                        "cache_level": 0,
                        "priority": 35,
                        "mm_keys": [],
                    }
                    | block
                    for end in ends
                ],
            }
        )

    def removed(self, tokens: Sequence[int], *ordinals: int) -> None:
        self.send({"type": "removed", "block_hashes": [self.name(tokens[: (n + 1) * SIZE]) for n in ordinals]})

    def moved(self, tokens: Sequence[int], ordinal: int, level: int) -> None:
        difference = {"type": "event_diff", "new_value": level, "old_value": 1 - level}
        name = self.name(tokens[: (ordinal + 1) * SIZE])
        self.send({"type": "updated", "block_hash": name, "cache_level": difference, "priority": None})


def off(**options: Any) -> ScriptedEngine:
    it = off_settings()
    connector = type(it.connector)(
        **{**{n: getattr(it.connector, n) for n in it.connector.__struct_fields__}, **OPTIONS}
    )
    return ScriptedEngine(type(it)(connector, it.bus, it.model, it.salt_key, it.stable_routing_id, "0" * 16), **options)


def exact(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(settings(MIB, **OPTIONS), **options)


def donate(engine: ScriptedEngine, tokens: Sequence[int], **scope: Any) -> str:
    before = set(donors(engine.sink))
    engine.serve([*tokens, 999], **scope)
    (donor,) = set(donors(engine.sink)) - before
    return donor


@pytest.mark.parametrize("spelling", ["unsigned", "signed", "hex"])
def test_donor_shrinks_and_goes_with_its_device_blocks(spelling: str) -> None:
    engine = off()
    cache = Cache(engine.leader, spelling=spelling)
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    assert donors(engine.sink) == {donor: (40, "device")}
    cache.removed(TOKENS, 9)
    assert donors(engine.sink) == {donor: (40, "device")}  # a tenth is tolerated
    cache.removed(TOKENS, 7, 8)
    assert donors(engine.sink) == {donor: (28, "device")}
    cache.removed(TOKENS, 4, 3, 6, 5)
    assert donors(engine.sink) == {}


def test_block_in_the_middle_takes_what_continues_it_along() -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    cache.removed(TOKENS, 2)
    assert donors(engine.sink) == {}


def test_donor_that_is_reported_later_is_tied_then() -> None:
    """The events of a request may be drained after its end."""
    engine = off()
    cache = Cache(engine.leader)
    donor = donate(engine, TOKENS)
    cache.stored(TOKENS)
    assert donors(engine.sink) == {donor: (40, "device")}
    cache.removed(TOKENS, 0)
    assert donors(engine.sink) == {}


def test_donor_whose_blocks_were_removed_before_it_ended_does_not_stay() -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    cache.removed(TOKENS, *range(9, 3, -1))
    donor = donate(engine, TOKENS)
    for n in range(2):
        cache.stored([500 + 10 * n + i for i in range(SIZE)])
    assert donors(engine.sink) == {}
    cut = donate(engine, TOKENS[:20])
    for n in range(2, 4):
        cache.stored([500 + 10 * n + i for i in range(SIZE)])
    assert donors(engine.sink) == {cut: (16, "device")}
    assert donor != cut


@pytest.mark.parametrize("scope", [{"cache_salt": "a"}, {"lora_task_id": 1}, {"multimodal_hashes": [[1] * 8]}])
def test_silence_about_a_scope_that_events_do_not_name_says_nothing(scope: dict[str, Any]) -> None:
    engine = off()
    cache = Cache(engine.leader)
    donor = donate(engine, TOKENS, **scope)
    for n in range(4):
        cache.stored([500 + 10 * n + i for i in range(SIZE)])
    assert donor in donors(engine.sink)


def test_salt_in_the_event_tells_tenants_apart() -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS, cache_salt="a")
    mine, other = donate(engine, TOKENS, cache_salt="a"), donate(engine, TOKENS, cache_salt="b")
    cache.removed(TOKENS, 0)
    assert donors(engine.sink) == {other: (40, "device")}
    assert mine != other


def test_two_names_of_one_block_must_both_go() -> None:
    """An event without its adapter makes adapter blocks look like the base model's (NVIDIA/TensorRT-LLM#18156)."""
    engine = off()
    one, two = Cache(engine.leader), Cache(engine.leader)
    two.name = lambda tokens: 7_000 + len(tokens)  # type: ignore[method-assign]
    one.stored(TOKENS)
    two.number = one.number
    two.stored(TOKENS)
    donor = donate(engine, TOKENS)
    one.number = two.number
    one.removed(TOKENS, *range(9, -1, -1))
    assert donors(engine.sink) == {donor: (40, "device")}
    two.number = one.number
    two.removed(TOKENS, *range(9, -1, -1))
    assert donors(engine.sink) == {}


def test_offloaded_blocks_move_their_donor_and_bring_it_back() -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    cache.moved(TOKENS, 9, 1)
    assert donors(engine.sink) == {donor: (40, "host_pinned")}
    cache.moved(TOKENS, 9, 0)
    assert donors(engine.sink) == {donor: (40, "device")}


def test_gap_withdraws_all_and_hearing_goes_on() -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    unheard = donate(engine, [7] * 12)
    cache.number += 3
    cache.stored([50, 51, 52, 53, 54, 55, 56, 57])
    assert unheard not in donors(engine.sink)
    assert donors(engine.sink) == {}
    assert engine.leader.snapshot()["kv_events"]["quarantined"] == 1
    again = donate(engine, [50, 51, 52, 53, 54, 55, 56, 57])  # of the event that showed the gap
    assert again in donors(engine.sink)
    cache.removed([50, 51, 52, 53, 54, 55, 56, 57], 0)
    assert donors(engine.sink) == {}


def test_engine_that_starts_over_is_heard_from_its_beginning() -> None:
    engine = off()
    cache = Cache(engine.leader)
    for n in range(3):
        cache.stored([500 + 10 * n + i for i in range(SIZE)])
    donate(engine, TOKENS)
    cache.number = 0
    cache.send({"type": "created", "num_blocks_per_cache_level": [64]})
    assert donors(engine.sink) == {}
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    assert donors(engine.sink) == {donor: (40, "device")}
    assert engine.leader.snapshot()["kv_events"]["standing"] == "fresh"


@pytest.mark.parametrize(
    "noise",
    [
        {"event_id": 1, "data": None},
        {"event_id": "x", "data": {"type": "stored"}},
        {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [{}]}},
        {},
    ],
)
def test_noise_is_a_loss_and_nothing_worse(noise: Any) -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    engine.leader.kv_events(noise)
    assert donors(engine.sink) == {}
    cache.number += 1
    cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    cache.removed(TOKENS, 1)
    assert donor not in donors(engine.sink)


@pytest.mark.parametrize("strange", [None, 5, [3], ["x"], (i for i in ())])
def test_what_is_no_event_is_counted(strange: Any) -> None:
    engine = off()
    engine.leader.kv_events(strange)
    numbers = engine.leader.snapshot()["kv_events"]
    assert (numbers["standing"], numbers.get("offered", 0)) == ("fresh", 0)


def test_partial_block_and_media_are_passed_over() -> None:
    engine = off()
    cache = Cache(engine.leader)
    cache.send(
        {
            "type": "stored",
            "parent_hash": None,
            "blocks": [{"block_hash": 5, "tokens": [{"token_id": 1, "token_extra_id": 0}], "cache_level": 0}],
        }
    )
    cache.stored(TOKENS, mm_keys=[{"hash": "ff", "start_offset": 0}])
    assert engine.leader.snapshot()["kv_events"]["blocks"] == 0
    assert engine.leader.snapshot()["kv_events"]["standing"] == "fresh"


def test_group_with_a_window_does_not_take_the_chain_away() -> None:
    """Early blocks of a live chain leave the windowed group all the time."""
    engine = off()
    cache = Cache(engine.leader)
    for group, window in ((1, 16), (0, 4096)):
        cache.fields = {"window_size": window, "layer_group_id": group}
        cache.stored(TOKENS)
    donor = donate(engine, TOKENS)
    cache.fields = {"window_size": 16, "layer_group_id": 1}
    cache.removed(TOKENS, 0, 1, 2)
    assert donors(engine.sink) == {donor: (40, "device")}
    cache.fields = {"window_size": 4096, "layer_group_id": 0}
    cache.removed(TOKENS, 0)
    assert donors(engine.sink) == {}


def test_events_of_other_ranks_are_for_others() -> None:
    engine = off(args=llm_args(4, enable_attention_dp=True, attention_dp_rank=1))
    cache = Cache(engine.leader, attention_dp_rank=0)
    cache.stored(TOKENS)
    assert engine.leader.snapshot()["kv_events"]["other_rank"] == 1
    mine = Cache(engine.leader, attention_dp_rank=1)
    mine.stored(TOKENS)
    donate(engine, TOKENS)
    mine.removed(TOKENS, 0)
    assert donors(engine.sink) == {}


def test_queue_is_bounded_and_what_is_dropped_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_events, "MAX_WAITING", 3)
    engine = off()
    cache = Cache(engine.leader)
    cache.stored(TOKENS)
    donate(engine, TOKENS)
    hearing = engine.leader._event_publisher.device
    assert hearing is not None
    jobs: list[Any] = []
    hearing._submit = lambda job: jobs.append(job) is None
    for n in range(6):
        cache.stored([500 + 10 * n + i for i in range(SIZE)])
    assert engine.leader.snapshot()["kv_events"]["waiting"] == 3
    for job in jobs:
        job()
    assert donors(engine.sink) == {}
    assert len(jobs) == 1


def test_events_before_the_pool_is_known_are_not_lost() -> None:
    """Under attention data parallelism the first scheduler output says who we are."""
    engine = off(args=llm_args(4, enable_attention_dp=True), dp_rank=1)
    cache = Cache(engine.leader, attention_dp_rank=1)
    cache.stored(TOKENS)
    assert engine.leader.snapshot()["kv_events"] is None
    engine.idle()
    assert engine.leader.snapshot()["kv_events"]["blocks"] == 10


def test_nothing_is_offered_because_of_an_event() -> None:
    for it in (off(), exact()):
        Cache(it.leader).stored(TOKENS)
        assert it.prefill(it.request([*TOKENS, 1])) == 0


def test_whoever_drains_the_engine_needs_no_connector_at_hand() -> None:
    engine = off()
    before = observe_kv_events([])
    listen(engine.leader)
    cache = Cache(engine.leader)
    cache.leader = type("", (), {"kv_events": staticmethod(observe_kv_events)})()  # type: ignore[assignment]
    cache.stored(TOKENS)
    assert observe_kv_events({"event_id": 1, "data": {"type": "unheard of"}}) == before + 1
    assert engine.leader.snapshot()["kv_events"]["blocks"] == 10
    assert observe_kv_events(None) == 0  # type: ignore[arg-type]


# on the reference engine


@pytest.fixture
def bench() -> Bench:
    return Bench(off_settings())


def test_reference_engine_evicting_makes_device_donors_stale(bench: Bench) -> None:
    """24 pages of 32 tokens: the third prompt evicts the first one's pages, and its donor goes with them."""
    with engine(bench, num_blocks=24) as running:

        def drain() -> None:
            bench.schedulers[0].kv_events(running.poll_kv_events(0))

        run(running, prompt(256, 1))
        drain()
        (first,) = donors(bench.sink)
        for seed in (2, 3, 4):
            run(running, prompt(256, seed))
            drain()
        wait_for(lambda: running.stats(0).active_blocks == 0)
        drain()
        left = donors(bench.sink)
        assert first not in left
        assert 1 <= len(left) <= 3
        assert all(tier == "device" for _, tier in left.values())
        _, warm = run(running, prompt(256, 4))
        assert warm.stats.cached_tokens > 0  # what is left is really there
        assert bench.schedulers[0].snapshot()["kv_events"]["standing"] == "fresh"


def test_reference_engine_s_events_from_another_thread_while_it_runs(bench: Bench) -> None:
    with engine(bench, num_blocks=24) as running:
        stop = threading.Event()

        def drain() -> None:
            while not stop.wait(0.002):
                bench.schedulers[0].kv_events(running.poll_kv_events(0))

        thread = threading.Thread(target=drain)
        thread.start()
        try:
            for seed in range(8):
                run(running, prompt(200, seed))
        finally:
            stop.set()
            thread.join(10)
        bench.schedulers[0].kv_events(running.poll_kv_events(0))
        numbers = bench.schedulers[0].snapshot()
        assert numbers["kv_events"]["standing"] == "fresh"
        assert numbers["kv_events"].get("errors", 0) == 0
        assert 0 < numbers["donors"] < 8
