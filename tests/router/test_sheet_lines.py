"""The record keeps the lines of the sheet that explain a decision, in whole tokens, and names Dynamo's own choice."""

from __future__ import annotations

from dynamo_semkv.config.schema import KvRouterOptions, ScoringConfig
from dynamo_semkv.contracts.codec import decode_route_event, encode_route_event
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.route_events import MAX_SHEET_LINES, RouteOpened, SheetLine
from dynamo_semkv.router.sheet_lines import dynamo_choice, dynamo_cost, sheet_lines
from dynamo_semkv.scoring.choose import ScoreSheet, choose
from dynamo_semkv.scoring.replica_view import ReplicaView


def named(replica: ReplicaKey) -> str:
    return f"w{replica.worker_id}/{replica.dp_rank}"


def donor_on(worker: int, tokens: int) -> tuple[SemanticTrtMatch, ReplicaKey]:
    found = SemanticTrtMatch(
        donor_id="d",
        reusable_token_count=tokens,
        exact_prefix_tokens=tokens,
        match_type=MatchType.EXACT_EQUIVALENT,
        location=WorkerLocation(worker, 0, Tier.HOST_PINNED),
        provider="p",
        provider_generation="g",
        overlap=0.5,
        confidence=1.0,
    )
    return found, ReplicaKey(worker, 0)


def sheet(views: list[ReplicaView], *matches: tuple[SemanticTrtMatch, ReplicaKey]) -> ScoreSheet:
    return choose(views, list(matches), 4_096, ScoringConfig(), b"seed")


def test_lines_add_up_and_say_who_might_not_be_chosen() -> None:
    of = sheet(
        [
            ReplicaView(ReplicaKey(1, 0), device_tokens=512, queued_prefill_tokens=0),
            ReplicaView(ReplicaKey(2, 0), queued_prefill_tokens=100),
            ReplicaView(ReplicaKey(3, 0), device_tokens=4_000, queued_prefill_tokens=40_000, overloaded=True),
        ],
        donor_on(2, 2_048),
    )
    lines = sheet_lines(of, dynamo_choice(of, KvRouterOptions()), named)
    assert [(line.replica, line.filtered_by) for line in lines] == [
        ("w2/0", None),
        ("w1/0", None),
        ("w3/0", "overloaded"),
    ]
    assert lines[0].donor > 0
    assert lines[0].load == -100
    assert lines[1].device == 512
    for line in lines:
        parts = line.device + line.host + line.disk + line.donor + line.load + line.decode + line.extra
        assert abs(parts - line.total) <= 3  # each is rounded by itself
    dynamo = dynamo_choice(of, KvRouterOptions())
    assert dynamo is not None
    assert named(dynamo.replica) == "w1/0"  # the donor is no part of it


def test_host_tokens_count_for_dynamo_with_the_weight_that_its_router_was_given() -> None:
    of = sheet([ReplicaView(ReplicaKey(1, 0), host_tokens=900), ReplicaView(ReplicaKey(2, 0), device_tokens=500)])
    for weight, chosen in ((0.75, 1), (0.5, 2), (0.0, 2)):
        dynamo = dynamo_choice(of, KvRouterOptions(host_cache_hit_weight=weight))
        assert dynamo is not None
        assert dynamo.replica.worker_id == chosen, weight


def test_blocks_of_running_requests_count_for_dynamo_and_for_us_alike() -> None:
    """A replica whose blocks are nearly all held by running requests does not win for some tokens in its host
    memory."""
    busy = ReplicaView(ReplicaKey(1, 0), host_tokens=512, active_decode_blocks=9_000, total_blocks=10_000)
    idle = ReplicaView(ReplicaKey(2, 0), total_blocks=10_000)
    of = choose([busy, idle], [], 1_024, ScoringConfig(), b"seed", block_size=32)
    assert of.best is not None
    assert of.best.replica == idle.replica
    line = next(line for line in sheet_lines(of, None, named) if line.replica == "w1/0")
    assert line.decode == -9_000 * 32
    assert line.total == line.host + line.decode
    costs = {row.replica: dynamo_cost(row, KvRouterOptions()) for row in of.rows}
    assert costs[busy.replica] - costs[idle.replica] == 9_000 * 32 - 0.75 * 512
    free = choose([busy, idle], [], 1_024, ScoringConfig(decode_weight=0.0), b"seed", block_size=32)
    assert free.best is not None
    assert free.best.replica == busy.replica


def test_a_replica_without_room_for_the_prompt_is_filtered_and_said_so() -> None:
    full = ReplicaView(
        ReplicaKey(1, 0), host_tokens=512, active_decode_blocks=9_990, total_blocks=10_000, needed_blocks=32
    )
    fits = ReplicaView(ReplicaKey(2, 0), active_decode_blocks=9_968, total_blocks=10_000, needed_blocks=32)
    of = choose([full, fits], [], 1_024, ScoringConfig(), b"seed", block_size=32)
    assert [line.filtered_by for line in sheet_lines(of, None, named)] == [None, "no_room"]


def test_an_idle_replica_is_not_kept_out_of_a_prompt_that_is_larger_than_it() -> None:
    idle = ReplicaView(ReplicaKey(1, 0), total_blocks=10, needed_blocks=32)
    assert choose([idle], [], 1_024, ScoringConfig(), b"seed", block_size=32).best is not None


def test_of_many_replicas_the_best_are_kept_and_dynamo_s_own_among_them() -> None:
    some = [ReplicaView(ReplicaKey(n, 0), queued_prefill_tokens=500) for n in range(1, 20)]
    idle = ReplicaView(ReplicaKey(20, 0), queued_prefill_tokens=0)
    of = sheet([*some, idle], *(donor_on(n, 3_000) for n in range(1, 20)))
    lines = sheet_lines(of, dynamo_choice(of, KvRouterOptions()), named)
    assert len(lines) == MAX_SHEET_LINES
    assert lines[-1].replica == "w20/0"
    assert lines[0].donor > 0


def test_nobody_may_be_chosen() -> None:
    of = sheet([ReplicaView(ReplicaKey(1, 0), not_allowed=True)])
    assert dynamo_choice(of, KvRouterOptions()) is None
    assert [line.filtered_by for line in sheet_lines(of, dynamo_choice(of, KvRouterOptions()), named)] == [
        "not_allowed"
    ]


def test_a_record_of_before_has_no_sheet_and_one_of_now_stays_small() -> None:
    plain = RouteOpened(
        route_id="0" * 32, router="r", attempt=0, model="m", mode="enforce", opened_at=1.0, prompt_key=b"k" * 16,
        input_tokens=8_192,
    )  # fmt: skip
    line = SheetLine(replica="a-pod-with-a-rather-long-name-7f9c/7", total=4_096, device=1_024, donor=3_500, load=-428)
    full = RouteOpened(
        **{name: getattr(plain, name) for name in plain.__struct_fields__ if name not in ("sheet", "sheet_rows")},
        sheet=(line,) * MAX_SHEET_LINES,
        sheet_rows=512,
    )
    assert decode_route_event(encode_route_event(full)) == full
    assert len(encode_route_event(full)) - len(encode_route_event(plain)) < 1_000
