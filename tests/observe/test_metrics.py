"""What is exported is what the catalogue names; labels are closed sets; replicas that are gone have no series."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_semkv.evidence.deadline import LookupStatus
from dynamo_semkv.observe.catalogue import CATALOGUE
from dynamo_semkv.observe.metrics import BATCH, Metrics
from dynamo_semkv.observe.state import RouterState
from dynamo_semkv.outcome.closed import JoinedBy, OrphanReason, OrphanReport, close_route
from tests.observe.fake_state import empty_state, fake_history, fake_state
from tests.outcome.build import observed, opened, report

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(metrics: Metrics) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return series(metrics).get((name, tuple(sorted(labels.items()))))


def busy() -> Metrics:
    """Everything that can be counted was counted at least once."""
    metrics = Metrics()
    metrics.opened(opened(lookup="hit", lookup_seconds=0.002))
    metrics.provider_answered("fingerprint", LookupStatus.HIT, 0.001)
    for route in fake_history(50).recent(50):
        metrics.closed(route)
    metrics.orphan(OrphanReport(report(), OrphanReason.LATE, 1.0))
    metrics.watch(fake_state)
    return metrics


def test_catalogue_and_exposition_are_one() -> None:
    kinds = {spec.name: spec.kind for spec in CATALOGUE}
    exported = {}
    for family in text_string_to_metric_families(busy().text()):
        suffix = "_total" if family.type == "counter" else ""
        exported[family.name + suffix] = family.type
    assert exported == kinds


def test_every_exported_label_is_in_the_catalogue() -> None:
    labels = {spec.name: set(spec.labels) for spec in CATALOGUE}
    for name, pairs in series(busy()):
        base = name
        for suffix in ("_bucket", "_sum", "_count"):
            base = base.removesuffix(suffix) if base.removesuffix(suffix) in labels else base
        assert {key for key, _ in pairs} - {"le"} == labels[base], name


def test_names_follow_the_conventions() -> None:
    names = [spec.name for spec in CATALOGUE]
    assert len(set(names)) == len(names)
    for spec in CATALOGUE:
        assert spec.name.startswith("semkv_")
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.meaning
        assert spec.usage
        assert spec.kind != "histogram" or spec.buckets
        assert not {"request", "route", "donor", "tenant", "salt", "prompt"} & set(spec.labels)


def test_no_created_series() -> None:
    assert "_created" not in busy().text()


def test_the_funnel_adds_up() -> None:
    metrics = Metrics()
    history = fake_history(300)
    for route in history.recent(300):
        metrics.closed(route)
    totals = history.totals()
    for step, tokens in totals.funnel.tokens.items():
        assert value(metrics, f"semkv_{step}_tokens_total") == tokens
    assert value(metrics, "semkv_unhinted_tokens_total") == totals.unhinted_tokens
    outcomes = {key: v for key, v in series(metrics).items() if key[0] == "semkv_outcome_total"}
    assert sum(outcomes.values()) == 300
    for name, sample in totals.ttft.items():
        assert value(metrics, "semkv_time_to_first_token_seconds_count", **{"class": name}) == sample.count


def test_hit_declined_and_orphan_are_three_things() -> None:
    metrics = Metrics()
    metrics.closed(close_route(opened(), observed(), report(), JoinedBy.ROUTE_ID, 1.0))
    metrics.closed(close_route(opened(2), observed(2), report(2, confirmed=0), JoinedBy.ROUTE_ID, 1.0))
    metrics.orphan(OrphanReport(report(3), OrphanReason.WRONG_REPLICA, 1.0))
    assert value(metrics, "semkv_outcome_total", outcome="materialized_exact", reason="ok") == 1
    assert value(metrics, "semkv_outcome_total", outcome="declined", reason="not_resident") == 1
    assert value(metrics, "semkv_outcome_total", outcome="orphan_report", reason="wrong_replica") == 1
    assert value(metrics, "semkv_placed_tokens_total") == 1_600
    assert value(metrics, "semkv_materialized_tokens_total") == 800


@pytest.mark.parametrize("lookup", ["hit", "miss", "timeout", "error"])
def test_lookups_and_placements(lookup: str) -> None:
    metrics = Metrics()
    metrics.opened(opened(lookup=lookup, lookup_seconds=0.004, mode="canary", decision_reason="below_margin"))
    metrics.opened(opened(lookup="skipped"))
    assert value(metrics, "semkv_lookup_total", result=lookup) == 1
    assert value(metrics, "semkv_lookup_total", result="skipped") == 1
    assert value(metrics, "semkv_lookup_seconds_count") == 1
    assert value(metrics, "semkv_placement_total", mode="canary", result="below_margin") == 1


def test_a_hit_on_which_nothing_was_acted_is_discovery_alone() -> None:
    metrics = Metrics()
    for fields in (
        {"lookup": "hit", "placed_tokens": 0},
        {"lookup": "hit", "placed_tokens": 64},
        {"lookup": "miss", "placed_tokens": 0},
    ):
        metrics.opened(opened(**fields))
    assert value(metrics, "semkv_discovery_only_total") == 1


def test_a_lookup_that_was_not_made_took_no_time() -> None:
    metrics = Metrics()
    metrics.provider_answered("fingerprint", LookupStatus.SKIPPED, 0.0)
    metrics.provider_answered("fingerprint", LookupStatus.TIMEOUT, 0.005)
    assert value(metrics, "semkv_provider_lookup_total", provider="fingerprint", result="timeout") == 1
    assert value(metrics, "semkv_provider_lookup_seconds_count", provider="fingerprint") == 1


def test_what_alerts_watch_is_there_before_it_happens() -> None:
    metrics = Metrics()
    metrics.watch(empty_state)
    assert value(metrics, "semkv_lookup_total", result="timeout") == 0
    assert value(metrics, "semkv_cross_check_total", result="differs") == 0
    assert value(metrics, "semkv_outcome_total", outcome="unconfirmed", reason="no_report") == 0
    assert value(metrics, "semkv_outcome_total", outcome="orphan_report", reason="late") == 0
    assert value(metrics, "semkv_fallback_total", reason="lookup_timeout") == 0


def test_values_of_peers_cannot_make_series_llm_d_router_1625() -> None:
    metrics = Metrics()
    for number in range(10_000):
        name = f"n{number}"
        metrics.opened(opened(number, lookup=name, mode=name, decision_reason=name, model=name))
        metrics.provider_answered(name, LookupStatus.MISS, 0.001)
    metrics.watch(lambda: fake_state(fallbacks={f"f{n}": 1 for n in range(10_000)}, mode="strange"))
    counted: dict[str, int] = {}
    for name, _ in series(metrics):
        counted[name] = counted.get(name, 0) + 1
    assert counted["semkv_lookup_total"] == len(LookupStatus) + 1
    assert counted["semkv_placement_total"] == counted["semkv_provider_lookup_total"] == 1
    assert counted["semkv_provider_lookup_seconds_count"] == 1
    assert counted["semkv_fallback_total"] == 65
    assert sum(v for (name, _), v in series(metrics).items() if name == "semkv_fallback_total") == 10_000
    assert value(metrics, "semkv_config_info", mode="other", config_hash="9d1f27c4") == 1


def test_what_was_learned_and_a_refused_file_show() -> None:
    current: list[RouterState] = [fake_state()]
    metrics = Metrics()
    metrics.watch(lambda: current[0])
    assert value(metrics, "semkv_expected_share", match_type="exact_equivalent") == 0.82
    assert value(metrics, "semkv_expected_share", match_type="semantic_candidate") == 0.03
    assert value(metrics, "semkv_config_reload_refused") == 0
    current[0] = replace(current[0], configuration={"last_reload_error": "placement.mode: got 'bold'"})
    assert value(metrics, "semkv_config_reload_refused") == 1


def test_series_of_a_replica_go_with_it_and_stay_gone_dynamo_14606() -> None:
    current: list[RouterState] = [fake_state()]
    metrics = Metrics()
    metrics.watch(lambda: current[0])
    gone = {"worker_id": "7587890123456789002", "dp_rank": "1"}
    assert value(metrics, "semkv_replica_resident_blocks", **gone) == 3_000
    current[0] = replace(current[0], replicas=current[0].replicas[:3])
    # A late report of the replica that went:
    metrics.closed(
        close_route(opened(), observed(), report(stable_routing_id="worker-b", dp_rank=1), JoinedBy.NONE, 1.0)
    )
    assert not [key for key in series(metrics) if dict(key[1]).items() >= gone.items()]
    assert value(metrics, "semkv_replicas", standing="ok") == 3


def test_unknown_load_is_no_series() -> None:
    metrics = Metrics()
    state = fake_state()
    metrics.watch(lambda: replace(state, replicas=[replace(r, queued_prefill_tokens=None) for r in state.replicas]))
    names = {name for name, _ in series(metrics)}
    assert "semkv_replica_queued_prefill_tokens" not in names
    assert "semkv_replica_active_decode_blocks" in names


def test_a_router_without_anything() -> None:
    metrics = Metrics()
    metrics.watch(lambda: empty_state(publisher=None, subscriber=None, catalog={}))
    assert value(metrics, "semkv_ready") == 0.0
    assert value(metrics, "semkv_catalog_donors") == 0.0
    assert value(metrics, "semkv_input_tokens_total") == 0.0


def test_spans_are_counted_where_they_are_made() -> None:
    metrics = Metrics()
    shown: dict[str, int] = {}
    metrics.watch(lambda: empty_state(spans=shown))
    assert "semkv_spans_total{" not in metrics.text()
    shown.update(ended=5, exported=3)
    for state, count in (("ended", 5.0), ("exported", 3.0), ("failed", 0.0)):
        assert f'semkv_spans_total{{state="{state}"}} {count}' in metrics.text()


def test_what_is_counted_together_is_there_when_somebody_reads() -> None:
    metrics = Metrics()
    for number in range(1, 3 * BATCH):
        metrics.opened(opened(lookup="hit", lookup_seconds=0.002))
        metrics.provider_answered("fingerprint", LookupStatus.MISS, 0.001)
        if number in (1, 2, BATCH // 2, BATCH, 2 * BATCH + 1):
            assert value(metrics, "semkv_lookup_total", result="hit") == number
            assert value(metrics, "semkv_provider_lookup_seconds_count", provider="fingerprint") == number


def test_one_that_cannot_be_counted_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.opened(opened(lookup="hit", lookup_seconds=None))  # no time to observe
    metrics.opened(opened(lookup="miss", lookup_seconds=0.002))
    assert value(metrics, "semkv_lookup_total", result="miss") == 1
    assert "not counted" in caplog.text


def test_readers_in_other_threads_count_each_decision_once() -> None:
    metrics, told = Metrics(), 40 * BATCH

    with ThreadPoolExecutor(3) as readers:
        reading = [readers.submit(lambda: [metrics.text() for _ in range(5)]) for _ in range(3)]
        for _ in range(told):
            metrics.opened(opened(lookup="miss"))
        for reader in reading:
            reader.result()
    assert value(metrics, "semkv_lookup_total", result="miss") == told
