"""A connector's numbers as Prometheus sees them: the catalogue, the numbers of a real run, and the server in the engine
process."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import worker_connector
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.telemetry import catalogue as c
from dynamo_semkv.telemetry import label_sets
from dynamo_semkv.telemetry.connector_metrics import ConnectorCollector, MetricsServer, exposition
from tests.worker_connector.harness import Bench, RecordingSink, engine, prompt, run, settings
from worker_connector.assembly import LeaderParts, _serve_metrics, assemble_leader_with
from worker_connector.fetch.tier import Stop
from worker_connector.fetch.transport import Why
from worker_connector.reference_engine.engine.config import build_llm_args
from worker_connector.timings import Durations

ROOT = Path(worker_connector.__file__).parent


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted({"dp_rank": "0", **labels}.items()))]


@pytest.fixture(scope="module")
def shown() -> tuple[str, Mapping[str, Any]]:
    """After a cold prompt, one loaded from the slab and one served by the engine's own cache."""
    bench = Bench(settings())
    with engine(bench) as running:
        tokens = prompt(200)
        run(running, tokens)
        running.reset_prefix_cache()
        run(running, tokens)
        run(running, tokens)
        text = exposition([bench.schedulers[0].snapshot])
        return text, bench.schedulers[0].snapshot()


def test_a_run_shows_in_the_numbers(shown: tuple[str, Mapping[str, Any]]) -> None:
    text, snapshot = shown
    for step in label_sets.TOKEN_STEPS:
        assert value(text, "semkv_connector_tokens_total", step=step) == 192
    assert value(text, "semkv_connector_outcome_total", outcome="materialized_exact", reason="ok") == 1
    assert value(text, "semkv_connector_outcome_total", outcome="local_exact", reason="local_covers") == 1
    assert value(text, "semkv_connector_attempts_total", event="asked") == 3
    assert value(text, "semkv_connector_copied_blocks_total", direction="loaded") == 6
    assert value(text, "semkv_connector_copied_blocks_total", direction="saved") == 6
    assert value(text, "semkv_connector_save_events_total", event="admitted") == 6
    assert value(text, "semkv_connector_slab_blocks", state="resident") == 6
    assert value(text, "semkv_connector_slab_blocks", state="free") == 250
    assert value(text, "semkv_connector_sealed_blocks") == 6
    assert value(text, "semkv_connector_donors") == 1
    assert value(text, "semkv_connector_donor_events_total", event="registered") == 1
    assert value(text, "semkv_connector_reports_total", result="sent") == 3
    assert value(text, "semkv_connector_leases") == value(text, "semkv_connector_tracked_requests") == 0
    assert value(text, "semkv_connector_ask_seconds_count") == 3
    assert value(text, "semkv_connector_build_metadata_seconds_count") > 0
    assert value(text, "semkv_connector_load_seconds_count") == 1
    assert value(text, "semkv_connector_load_seconds_sum") > 0
    assert value(text, "semkv_connector_save_seconds_count") == sum(snapshot["save_seconds"]["counts"]) > 0
    assert value(text, "semkv_connector_anomalies_total", kind="tokens_differ") == 0
    assert value(text, "semkv_connector_faults_total", callback="cancel_load") == 0
    generation = snapshot["generation"]
    labels = {"generation": generation, "materialization": "exact", "connector": snapshot["connector"]}
    assert value(text, "semkv_connector_info", **labels) == 1


def test_every_series_is_in_the_catalogue_with_its_labels(shown: tuple[str, Mapping[str, Any]]) -> None:
    specs = {spec.name: spec for spec in c.CONNECTOR}
    for (name, labels), _ in samples(shown[0]).items():
        spec = specs.get(name) or specs[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert {label for label, _ in labels} - {"le"} == set(spec.labels)


def test_every_metric_of_the_catalogue_is_shown_by_a_connector_with_a_bus(shown: tuple[str, Mapping[str, Any]]) -> None:
    """What the bench has not: a bus, a background thread, spans, a disk, KV events."""
    bus = {"connected": True, "buffered": 2, "dropped": 1, "reconnects": 3}
    background = {"background_refused": 4, "background_failed": 0}
    device = {"standing": "quarantined", "blocks": 7, "waiting": 0, "offered": 9, "events": {"stored": 8, "gap": 1}}
    rank = {**shown[1]["rank"], "files": {"written": 3}}
    disk = {"blocks": 3, "wishes": 0, "spilled": 3}
    full = {**shown[1], "bus": bus, "background": background, "spans": {"ended": 5}}
    fetch = {
        "pulls": {"complete": 2, "timeout": 1},
        "pulled_blocks": 6,
        "serving": {"greeted": 1, "sent_blocks": 4, "sent_bytes": 9},
        "damaged": 0,
        "seconds": Durations(c.FETCH_SECONDS.buckets).snapshot(),
    }
    holds = {"results": {"arrived": 2, "late": 1}, "seconds": Durations(c.DISK_HOLD_SECONDS.buckets).snapshot()}
    full |= {"kv_events": device, "disk": disk, "rank": rank, "fetch": fetch, "disk_holds": holds}
    text = exposition([lambda: full])
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in samples(text)}
    assert families == {spec.name for spec in c.CONNECTOR}
    assert value(text, "semkv_connector_bus_connected") == 1
    assert value(text, "semkv_connector_bus_dropped_messages_total") == 1
    assert value(text, "semkv_connector_spans_total", state="ended") == 5
    assert value(text, "semkv_connector_anomalies_total", kind="background_refused") == 4
    assert value(text, "semkv_connector_disk_files_total", event="written") == 3
    assert value(text, "semkv_connector_disk_events_total", event="spilled") == 3
    assert value(text, "semkv_connector_disk_holds_total", result="late") == 1
    assert value(text, "semkv_connector_disk_hold_seconds_count") == 0
    assert value(text, "semkv_connector_kv_events_total", event="gap") == 1
    assert value(text, "semkv_connector_kv_events_total", event="offered") == 9
    assert value(text, "semkv_connector_kv_events_fresh") == 0
    assert value(text, "semkv_connector_fetch_pulls_total", result="timeout") == 1
    assert value(text, "semkv_connector_fetch_blocks_total", direction="served") == 4
    assert value(text, "semkv_connector_fetch_seconds_count") == 0
    assert "other" not in {label for _, labels in samples(text) for _, label in labels}


def counted(*files: str) -> set[str]:
    """Names that these files count under."""
    text = "".join((ROOT / file).read_text() for file in files)
    return set(re.findall(r'counts\["(\w+)"\]', text))


@pytest.mark.parametrize(
    ("files", "known"),
    [
        (("requests/save_planner.py",), label_sets.SAVE_EVENTS),
        (("donors/registry.py",), label_sets.DONOR_EVENTS),
        (("requests/hints.py",), label_sets.HINT_EVENTS),
        (
            ("requests/attempts.py",),
            (*label_sets.ATTEMPT_EVENTS, "offered_tokens", "confirmed_tokens", "fetched_tokens"),
        ),
        (
            ("leader/event_publisher.py",),
            (
                *("reports", "reports_refused", "reports_dropped", "announcements"),
                *("residency_errors", "donors_not_restored"),
            ),
        ),
        (("disk/tier.py",), label_sets.DISK_EVENTS),
        (("disk/store.py",), label_sets.FILE_EVENTS),
        (("donors/kv_events.py", "donors/device_events.py", "donors/device_blocks.py"), label_sets.KV_EVENTS),
        (
            (
                "leader/leader.py",
                "leader/cache_generation.py",
                "leader/scheduler_output.py",
                "requests/async_loads.py",
                "rank/rank.py",
                "rank/load_thread.py",
                "link/leader_link.py",
                "link/rank_aggregator.py",
            ),
            (
                *(k for k in label_sets.ANOMALIES if not k.startswith("background") and k != "sealing_failed"),
                "loaded_blocks",
                "saved_blocks",
                "called_leader",
            ),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and str(value[0]).endswith(".py") else "",
)
def test_what_is_counted_is_a_known_label(files: tuple[str, ...], known: tuple[str, ...]) -> None:
    """A counter that is added needs its place in the catalogue: as `other` it would tell nobody anything."""
    assert counted(*files) - set(known) == set()


def test_results_of_pulls_are_the_reasons_of_its_parts() -> None:
    told = {why.value for why in (*Why, *Stop)} | counted("fetch/fetcher.py") | {"complete", "short", "nothing_missing"}
    told |= {"bad_address", "address_not_allowed", "resting", "error"}
    assert told == set(label_sets.PULL_RESULTS)


def test_callbacks_are_the_schedulers() -> None:
    named = set(re.findall(r'_fault\("(\w+)"\)', (ROOT / "scheduler.py").read_text()))
    assert named == set(label_sets.CALLBACKS)


def test_what_is_in_no_set_is_other(shown: tuple[str, Mapping[str, Any]]) -> None:
    strange = {**shown[1], "faults": {"brand_new": 2, "more": 1}, "outcomes": {"new/newer": 4}}
    text = exposition([lambda: strange])
    assert value(text, "semkv_connector_faults_total", callback="other") == 3
    unknown = {"outcome": Outcome.UNKNOWN.value, "reason": Reason.UNKNOWN.value}
    assert value(text, "semkv_connector_outcome_total", **unknown) == 4


def test_a_rank_that_fails_hides_no_other(
    shown: tuple[str, Mapping[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Mapping[str, Any]:
        raise RuntimeError("no")

    collector = ConnectorCollector([broken, lambda: {**shown[1], "dp_rank": 1}])
    ranks = {sample.labels["dp_rank"] for family in collector.collect() for sample in family.samples}
    assert ranks == {"1"}
    assert collector.failures == 1
    assert "cannot be read" in caplog.text


def test_a_leader_without_a_pool_shows_what_it_knows() -> None:
    bench = Bench(settings())
    parts = assemble_leader_with(_llm_args(), bench.settings, RecordingSink())
    text = exposition([parts.snapshot])
    assert value(text, "semkv_connector_donors") == 0
    assert "semkv_connector_slab_blocks{" not in text


def _llm_args() -> Any:
    from tests.worker_connector.harness import SMALL
    from worker_connector.reference_engine.engine.config import EngineConfig
    from worker_connector.reference_engine.models.presets import ModelSource, load_model

    config = EngineConfig(model=ModelSource(config=SMALL))
    return build_llm_args(config, load_model(config.model), Bench(settings()).spec(), 0)


def _parts(**connector: Any) -> LeaderParts:
    return assemble_leader_with(_llm_args(), settings(**connector), RecordingSink())


def test_the_engine_process_serves_them_itself() -> None:
    parts = _parts(metrics_port=0)
    server = _serve_metrics(parts, settings(metrics_port=0).connector, 0)
    assert isinstance(server, MetricsServer)
    try:
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            assert "semkv_connector_donors" in answer.read().decode()
    finally:
        server.close()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(server.url.split(":")[2].split("/")[0]))) != 0


def test_each_rank_takes_its_own_port_and_one_that_is_taken_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert _serve_metrics(_parts(), settings(metrics_port=port - 1).connector, 1) is None
    assert f"no metrics on 127.0.0.1 port {port - 1}" in caplog.text


def test_a_port_beyond_the_last_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    assert _serve_metrics(_parts(), settings(metrics_port=65_535).connector, 1) is None
    assert "no metrics" in caplog.text


@pytest.mark.parametrize("host", ["a" * 70, "nul\x00"])
def test_a_host_that_is_none_is_refused_with_the_file(host: str) -> None:
    with pytest.raises(ContractError, match=r"connector\.metrics_host"):
        settings(metrics_port=0, metrics_host=host)


def test_durations_fall_into_their_buckets() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.0, 0.1, 0.5, 2.0):
        durations.add(seconds)
    assert durations.snapshot() == {"bounds": [0.1, 1.0], "counts": [2, 1, 1], "sum": 2.6}
