"""deploy/observability: the real promtool accepts it, and it names only what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_semkv.observe import dynamo_counters, rfc
from dynamo_semkv.observe.catalogue import CATALOGUE
from dynamo_semkv.observe.reference import label_values
from dynamo_semkv.telemetry.catalogue import CONNECTOR
from tests.observe.test_reference import unknown_fields

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "observability" / "prometheus"
GRAFANA = ROOT / "deploy" / "observability" / "grafana"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.yml"))
DYNAMO_SERIES = set(dynamo_counters.SERIES)
SPECS = {spec.name: spec for spec in (*CATALOGUE, *CONNECTOR)}
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "${datasource}": "semkv-prometheus"}


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    path = shutil.which("promtool")
    assert path is not None, "promtool is missing: apt install prometheus (.ci/run does it)"
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in RULE_FILES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def dashboard() -> dict[str, Any]:
    return json.loads((GRAFANA / "dashboards" / "semkv.json").read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every rule and panel, Grafana's variables filled in."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], filled(target["expr"])


def filled(text: str) -> str:
    for name, value in GRAFANA_VARIABLES.items():
        text = text.replace(name, value)
    assert "$" not in text, text
    return text


def metric_of(series: str) -> str:
    """The catalogue's name of a series, which of a histogram has an ending of its own."""
    for ending in ("_bucket", "_sum", "_count"):
        base = series.removesuffix(ending)
        if base in SPECS and SPECS[base].kind == "histogram":
            return base
    return series


def faults(expression: str) -> list[str]:
    """Series, labels and label values that do not exist."""
    found = []
    for series, matchers in re.findall(r"(?<![\w:])(semkv_\w+)(?:\{([^}]*)\})?", expression):
        spec = SPECS.get(metric_of(series))
        if spec is None or (spec.kind == "histogram" and series == spec.name):
            found.append(f"no series {series}")
            continue
        for label, values in re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', matchers):
            if label in ("job", "instance"):
                continue
            if label not in spec.labels:
                found.append(f"{series} has no label {label}")
            else:
                known = set(re.findall(r"`(\w+)`", label_values(spec, label)))
                found += [f"{series}: {label} is never {value}" for value in values.split("|") if value not in known]
    dynamo = re.findall(r"\bdynamo_\w+", expression)
    found += [f"Dynamo has no series {name}" for name in dynamo if name not in DYNAMO_SERIES]
    used = set(re.findall(r"(?<![\w:])(?:job|job_outcome):semkv_\w+:\w+", expression))
    return found + [f"nothing records {name}" for name in sorted(used - RECORDED)]


def test_the_checker_sees_what_does_not_exist() -> None:
    assert faults('rate(semkv_lookup_total{result="hit",job="x"}[5m]) / semkv_lookup_seconds_sum') == []
    assert faults("semkv_lookups_total") == ["no series semkv_lookups_total"]
    assert faults("semkv_lookup_seconds") == ["no series semkv_lookup_seconds"]
    assert faults('semkv_lookup_total{reason="x"}') == ["semkv_lookup_total has no label reason"]
    assert faults('semkv_lookup_total{result=~"hit|late"}') == ["semkv_lookup_total: result is never late"]
    assert faults("dynamo_component_router_hits_total") == ["Dynamo has no series dynamo_component_router_hits_total"]
    assert faults("job:semkv_nothing:rate5m > 0") == ["nothing records job:semkv_nothing:rate5m"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_series_label_and_value_exists(where: str, expression: str) -> None:
    assert faults(expression) == []
    assert re.search(r"semkv_|\bup\b|dynamo_component_router_", expression)


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_every_metric_is_in_a_panel(spec) -> None:
    shown = {
        metric_of(name) for panel in panels() for t in panel["targets"] for name in re.findall(r"semkv_\w+", t["expr"])
    }
    assert spec.name in shown


@pytest.mark.parametrize("name", dynamo_counters.SERIES)
def test_dynamos_own_counters_are_in_panels_beside_ours(name: str) -> None:
    shown = [panel["title"] for panel in panels() for t in panel["targets"] if name in t["expr"]]
    assert len(set(shown)) == 2


@pytest.mark.parametrize("asked", rfc.ASKED, ids=lambda asked: asked.what)
def test_what_the_rfc_asks_for_is_exported_and_in_a_panel(asked: rfc.Asked) -> None:
    spec = SPECS.get(asked.series)
    assert faults(f"{asked.series}_count" if spec is not None and spec.kind == "histogram" else asked.series) == []
    if asked.series.startswith("job:"):
        assert asked.series in RECORDED
    else:
        name = metric_of(asked.series.partition("{")[0])
        assert any(name in t["expr"] for panel in panels() for t in panel["targets"])
    assert len({one.series for one in rfc.ASKED}) == len(rfc.ASKED), "distinct, never one semantic hit"


def test_labels_that_legends_and_sums_name_exist() -> None:
    for panel in panels():
        for target in panel["targets"]:
            ours = re.findall(r"semkv_\w+", target["expr"])
            known = {*(SPECS[metric_of(ours[0])].labels if ours else ()), "job", "instance", "le"}
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]):
                named |= {label.strip() for label in group.split(",")}
            assert named <= known, panel["title"]


def test_promtool_accepts_the_configuration() -> None:
    ran = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "2 rule files found" in ran.stdout


def test_promtool_accepts_the_rules() -> None:
    ran = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)
    assert ran.returncode == 0, ran.stderr + ran.stdout


def test_alerts_fire_when_they_should() -> None:
    ran = promtool("test", "rules", PROMETHEUS / "rules_test.yml")
    assert ran.returncode == 0, ran.stderr + ran.stdout


def test_every_alert_is_seen_to_fire_and_to_keep_still() -> None:
    cases = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    tests = [test for case in cases for test in case["alert_rule_test"]]
    fired = {test["alertname"] for test in tests if test["exp_alerts"]}
    assert fired == {alert["alert"] for alert in ALERTS}


def test_the_series_of_the_rule_tests_exist() -> None:
    cases = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    series = {entry["series"] for case in cases for entry in case["input_series"]}
    assert {one: found for one in series if not one.startswith("up{") and (found := faults(one))} == {}


def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [filled(target["expr"]) for panel in panels() for target in panel["targets"]]
    group = {"name": "panels", "rules": [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries)]}
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [group]}))
    ran = promtool("check", "rules", tmp_path / "panels.yml")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert f"{len(queries)} rules found" in ran.stdout


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
    section = OPERATIONS.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert len(section.split()) > 15
    assert alert["labels"]["severity"] in ("warning", "critical")


def test_the_document_names_what_exists() -> None:
    titles = {panel["title"] for panel in panels()}
    named = {" ".join(title.split()) for title in re.findall(r'panel\s+"([^"]+)"', OPERATIONS, re.IGNORECASE)}
    assert named - titles == set()
    assert len(named) > 9
    assert set(re.findall(r"^### (Semkv\w+)$", OPERATIONS, re.MULTILINE)) == {rule["alert"] for rule in ALERTS}
    for anchor in re.findall(r"\]\(#(\w+)\)", OPERATIONS):
        assert anchor in {rule["alert"].lower() for rule in ALERTS}
    assert unknown_fields(OPERATIONS) == set()


def test_dashboard_and_provisioning_fit_together() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "semkv.yml").read_text())["providers"][0]
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables["datasource"]["current"]["value"] == source["uid"]
    assert variables["datasource"]["query"] == source["type"]
    assert provider["options"]["path"] == "${SEMKV_GRAFANA_DASHBOARDS}"
    assert "SEMKV_GRAFANA_DASHBOARDS" in OPERATIONS
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, (panel["title"], taken.get(cell))
            taken[cell] = panel["title"]
