"""graphs/kubernetes: every document fits its schema, every reference has its object, and every process accepts what it
is given."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml

from dynamo_semkv.cli.command import _parser
from dynamo_semkv.config.host_memory import Available
from dynamo_semkv.config.load import build as build_config
from dynamo_semkv.config.load import load_config, parse_yaml
from scripts import prometheus_rule
from tests.deploy import dynamo_graph_schema as schema
from tests.deploy.kustomize import build
from worker_connector.engine_api.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "graphs" / "kubernetes"
WORKERS = {"aggregated": "TRTLLMWorker", "attention-dp": "TRTLLMWorker", "disaggregated": "TRTLLMPrefillWorker"}
"""The component with our connector in it, that the router is in front of."""
GRAPHS = list(WORKERS)
FOLDERS = ["nats", *GRAPHS, "monitoring", "podmonitors"]
KINDS = {
    "Job": "io.k8s.api.batch.v1.Job",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Service": "io.k8s.api.core.v1.Service",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
}


def one(documents: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    found = [d for d in documents if d["kind"] == kind and (name is None or d["metadata"]["name"] == name)]
    assert len(found) == 1, (kind, name, len(found))
    return found[0]


def container(graph: dict[str, Any], component: str) -> dict[str, Any]:
    spec = next(c for c in graph["spec"]["components"] if c["name"] == component)["podTemplate"]["spec"]
    found: dict[str, Any] = spec["containers"][0]
    return found


def environment(of: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in of.get("env", [])}


def test_every_folder_is_tested() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/kustomization.yaml")} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_documents_fit_their_schemas(folder: str) -> None:
    for document in build(FOLDER / folder):
        if document["kind"] == schema.KIND:
            schema.check_graph(document)
        elif document["kind"] in KINDS:
            schema.check(KINDS[document["kind"]], document)
        else:
            assert document["apiVersion"] == "monitoring.coreos.com/v1", document["kind"]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda g: g["spec"].update(services={}), "services"),
        (lambda g: g["spec"]["components"][0].update(type="router"), "router"),
        (lambda g: g["spec"]["components"][1].update(name="frontend"), "unique"),
        (lambda g: g["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0].update(name="server"), "main"),
        (
            lambda g: g["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0].update(enviroment=[]),
            "enviroment",
        ),
        (
            lambda g: g["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0].update(image="a/b:latest"),
            "version",
        ),
    ],
)
def test_the_schema_finds_what_the_operator_would_refuse(break_it: Any, says: str) -> None:
    graph = copy.deepcopy(one(build(FOLDER / "aggregated"), schema.KIND))
    break_it(graph)
    with pytest.raises((jsonschema.ValidationError, ValueError), match=says):
        schema.check_graph(graph)


@pytest.mark.parametrize("folder", GRAPHS)
def test_what_is_mounted_and_asked_for_is_there(folder: str) -> None:
    documents = build(FOLDER / folder)
    maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
    for component in one(documents, schema.KIND)["spec"]["components"]:
        pod = component["podTemplate"]["spec"]
        volumes = {volume["name"]: maps[volume["configMap"]["name"]] for volume in pod.get("volumes", [])}
        for used in pod["containers"]:
            mounted = {
                f"{mount['mountPath']}/{name}"
                for mount in used.get("volumeMounts", [])
                for name in volumes[mount["name"]]
            }
            words = [*used.get("command", []), *used.get("args", []), *map(str, environment(used).values())]
            assert {word for word in words if word.startswith("/etc/")} <= mounted
    host, _, port = load_from(maps["semkv"]["semkv.yaml"]).bus.url.removeprefix("nats://").partition(":")
    assert [entry["port"] for entry in services[host]["spec"]["ports"]] == [int(port)]
    labels = one(documents, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert services[host]["spec"]["selector"] == labels


@pytest.mark.parametrize("folder", GRAPHS)
def test_no_pod_is_told_of_the_namespace_s_services_in_its_environment(folder: str) -> None:
    documents = build(FOLDER / folder)
    pods = [c["podTemplate"]["spec"] for c in one(documents, schema.KIND)["spec"]["components"]]
    pods += [one(documents, kind)["spec"]["template"]["spec"] for kind in ("StatefulSet", "Job")]
    assert [pod["enableServiceLinks"] for pod in pods] == [False] * len(pods)


def load_from(text: str) -> Any:
    return build_config(parse_yaml(text))


@pytest.mark.parametrize("folder", GRAPHS)
def test_router_takes_its_command_and_starts_in_shadow(folder: str) -> None:
    documents = build(FOLDER / folder)
    router = container(one(documents, schema.KIND), "SemkvRouter")
    assert router["command"][:3] == ["python3", "-m", "dynamo_semkv"]
    assert _parser().parse_args(router["command"][3:]).config == "/etc/semkv/semkv.yaml"
    config = load_from(one(documents, "ConfigMap", "semkv")["data"]["semkv.yaml"])
    assert config.placement.mode.value == "shadow"
    assert config.connector.materialization.value == "exact"
    port = next(port["containerPort"] for port in router["ports"] if port["name"] == "system")
    assert environment(router)["DYN_SYSTEM_PORT"] == str(port)


@pytest.mark.parametrize("folder", GRAPHS)
def test_worker_arguments_are_dynamo_s(folder: str) -> None:
    worker = container(one(build(FOLDER / folder), schema.KIND), WORKERS[folder])
    parsed = parsed_arguments(worker)
    disaggregated = folder == "disaggregated"
    if not disaggregated:
        assert parsed["endpoint_types"] == "none", "the workers' own model would be called around the router"
    assert parsed["publish_kv_events"] is True
    config = load_from(one(build(FOLDER / folder), "ConfigMap", "semkv")["data"]["semkv.yaml"])
    assert (parsed["component"], parsed["endpoint"]) == (config.dynamo.worker_component, config.dynamo.worker_endpoint)
    assert parsed["disaggregation_mode"].rpartition(".")[2] == ("PREFILL" if disaggregated else "AGGREGATED")
    assert parsed["enable_attention_dp"] is (folder == "attention-dp")
    engine = yaml.safe_load(one(build(FOLDER / folder), "ConfigMap", "semkv")["data"]["engine.yaml"])
    assert parsed["tensor_parallel_size"] == engine.get("tensor_parallel_size", 1)
    assert parsed["kv_block_size"] == engine["kv_cache_config"]["tokens_per_block"], "the card would say another size"
    assert environment(worker)["DYN_STABLE_ROUTING_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def parsed_arguments(worker: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.deploy.trtllm_arguments", *worker["args"]]
    run = subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True)
    parsed: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return parsed


def test_disaggregated_workers_find_each_other_and_no_client_finds_the_prefill_workers() -> None:
    documents = build(FOLDER / "disaggregated")
    graph = one(documents, schema.KIND)
    data = one(documents, "ConfigMap", "semkv")["data"]
    prefill, decode = (container(graph, name) for name in ("TRTLLMPrefillWorker", "TRTLLMDecodeWorker"))
    told, offered = parsed_arguments(prefill), parsed_arguments(decode)
    public = load_from(data["semkv.yaml"]).model.name
    assert (offered["served_model_name"] or offered["model"]) == public
    assert told["served_model_name"] not in (None, public), "the router would refuse to start"
    assert told["model"] == offered["model"]
    assert (offered["component"], offered["disaggregation_mode"]) == ("backend", "DisaggregationMode.DECODE")
    engines = [yaml.safe_load(data[Path(of["extra_engine_args"]).name]) for of in (told, offered)]
    for same in ("backend", "cache_transceiver_config"):
        assert engines[0][same] == engines[1][same]
    assert engines[0]["kv_cache_config"]["tokens_per_block"] == engines[1]["kv_cache_config"]["tokens_per_block"]
    assert "kv_connector_config" not in engines[1]
    types = {c["name"]: c.get("type") for c in graph["spec"]["components"]}
    assert (types["TRTLLMPrefillWorker"], types["TRTLLMDecodeWorker"]) == ("prefill", "decode")


@pytest.mark.parametrize("folder", GRAPHS)
def test_the_connector_refuses_nothing_of_the_engine_s_settings(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = build(FOLDER / folder)
    limits = container(one(documents, schema.KIND), WORKERS[folder])["resources"]["limits"]
    pod = Available(int(limits["memory"].removesuffix("Gi")) * 2**30, "memory.max of /sys/fs/cgroup")
    monkeypatch.setattr("worker_connector.engine_api.settings.total_memory", lambda: pod)
    data = one(documents, "ConfigMap", "semkv")["data"]
    engine = yaml.safe_load(data["engine.yaml"])
    (tmp_path / "semkv.yaml").write_text(data["semkv.yaml"])
    arguments = SimpleNamespace(
        **{name: SimpleNamespace(**value) if isinstance(value, dict) else value for name, value in engine.items()}
    )
    env = {"SEMKV_CONFIG": str(tmp_path / "semkv.yaml"), "DYN_STABLE_ROUTING_ID": "semkv-agg-trtllmworker-0"}
    settings = load_settings(arguments, env)
    assert settings.exact
    connector = engine["kv_connector_config"]
    module = __import__(connector["connector_module"], fromlist=["_"])
    assert hasattr(module, connector["connector_scheduler_class"])
    assert hasattr(module, connector["connector_worker_class"])
    resources = container(one(documents, schema.KIND), WORKERS[folder])["resources"]
    ranks = engine.get("tensor_parallel_size", 1)
    for kind in ("requests", "limits"):
        memory = int(resources[kind]["memory"].removesuffix("Gi")) * 2**30
        assert memory > ranks * load_config(tmp_path / "semkv.yaml").config.connector.slab_bytes, kind


@pytest.mark.parametrize("folder", GRAPHS)
def test_every_container_has_a_memory_limit(folder: str) -> None:
    documents = build(FOLDER / folder)
    pods = [c["podTemplate"]["spec"] for c in one(documents, schema.KIND)["spec"]["components"]]
    pods += [one(documents, kind)["spec"]["template"]["spec"] for kind in ("StatefulSet", "Job")]
    for used in (used for pod in pods for used in pod["containers"]):
        assert used["resources"]["requests"]["memory"], used
        assert used["resources"]["limits"]["memory"], used


def test_deepseek_s_attention_has_the_block_of_its_kernels() -> None:
    """kv_lora_rank 512 and qk_rope_head_dim 64: FlashMLA on Hopper makes pages of 64 tokens whatever the settings
    say."""
    documents = build(FOLDER / "attention-dp")
    assert parsed_arguments(container(one(documents, schema.KIND), "TRTLLMWorker"))["model"].endswith("V2-Lite")
    cache = yaml.safe_load(one(documents, "ConfigMap", "semkv")["data"]["engine.yaml"])["kv_cache_config"]
    assert (cache["tokens_per_block"], cache["use_kv_cache_manager_v2"]) == (64, True)


def scraped(monitor: dict[str, Any], template: dict[str, Any]) -> dict[str, int]:
    """Named ports of this pod that the PodMonitor scrapes; none where its selector does not fit."""
    spec = monitor["spec"]
    if not spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
        return {}
    wanted = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", [])}
    return {name: port for name, port in ports.items() if name in wanted}


@pytest.mark.parametrize("folder", GRAPHS)
def test_the_connector_of_every_rank_is_scraped(folder: str) -> None:
    documents = build(FOLDER / folder)
    data = one(documents, "ConfigMap", "semkv")["data"]
    connector, engine = load_from(data["semkv.yaml"]).connector, yaml.safe_load(data["engine.yaml"])
    template = pod_template(documents, WORKERS[folder])
    ports = scraped(one(build(FOLDER / "monitoring"), "PodMonitor", "semkv-connectors"), template)
    ranks = engine["tensor_parallel_size"] if engine.get("enable_attention_dp") else 1
    assert sorted(ports.values()) == [connector.metrics_port + rank for rank in range(ranks)]
    assert connector.metrics_host == "0.0.0.0", "Prometheus asks the pod's address"
    # What the operator's own probes and PodMonitor use, since the manifest's list of ports replaces the operator's.
    assert scraped(one(build(FOLDER / "podmonitors"), "PodMonitor", "semkv-workers"), template) == {"system": 9090}
    router = pod_template(documents, "SemkvRouter")
    assert scraped(one(build(FOLDER / "podmonitors"), "PodMonitor", "semkv-routers"), router) == {"system": 9090}


def test_routers_are_alerted_about_under_the_job_that_podmonitors_give() -> None:
    """The operator of Prometheus takes `jobLabel` of the pod, and else NAMESPACE/NAME of the PodMonitor, as for
    Dynamo's own."""
    monitor = one(build(FOLDER / "podmonitors"), "PodMonitor", "semkv-routers")
    labels = pod_template(build(FOLDER / "aggregated"), "SemkvRouter")["metadata"]["labels"]
    jobs = {labels[monitor["spec"]["jobLabel"]], "prod/dynamo-router"}
    cases = yaml.safe_load((ROOT / "deploy/observability/prometheus/rules_test.yml").read_text())["tests"]
    fired = {
        alert["exp_labels"]["job"]
        for case in cases
        for test in case["alert_rule_test"]
        for alert in test["exp_alerts"]
        if test["alertname"] == "SemkvRouterDown"
    }
    assert fired == jobs


def pod_template(documents: list[dict[str, Any]], component: str) -> dict[str, Any]:
    components = one(documents, schema.KIND)["spec"]["components"]
    found: dict[str, Any] = next(c for c in components if c["name"] == component)["podTemplate"]
    return found


def test_monitoring_carries_the_dashboard_and_the_rules() -> None:
    documents = build(FOLDER / "monitoring")
    dashboard = one(documents, "ConfigMap")
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(dashboard["data"]["semkv.json"])["panels"]
    assert (FOLDER / "monitoring" / "prometheusrule.yaml").read_text() == prometheus_rule.text(), prometheus_rule.HEAD
