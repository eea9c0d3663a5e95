"""The broker of the shipped graphs on a real server: each pod has the URL of its role, and the server refuses it the
rest."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
import yaml

from dynamo_semkv.bus.inspection import inspect
from dynamo_semkv.bus.setup import BusError, set_up
from dynamo_semkv.bus.streams import STREAMS
from dynamo_semkv.config.load import load_config
from dynamo_semkv.config.schema import BusConfig
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.identity import StableReplica
from tests.bus.waiting import until
from tests.deploy import dynamo_graph_schema as schema
from tests.deploy import nats_example
from tests.deploy.kustomize import build
from tests.deploy.nats_example import Broker
from tests.deploy.roles import roles
from tests.deploy.test_kubernetes import FOLDER, GRAPHS, ROOT, WORKERS, container, one

POD = StableReplica("semkv-agg-trtllmworker-5d8f-x2x7z", 0)
PERMISSIONS = re.compile(r"user: (\S+), password: (\S+)\s*permissions: \{(.*?)\n        \}", re.DOTALL)


@pytest.fixture(scope="module")
def secret() -> dict[str, str]:
    made = subprocess.run([FOLDER / "nats" / "make-secret.sh"], check=True, capture_output=True, text=True).stdout
    found = yaml.safe_load(made)
    schema.check("io.k8s.api.core.v1.Secret", found)
    data: dict[str, str] = found["stringData"]
    return data


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, secret: dict[str, str]) -> Iterator[Broker]:
    """The server with the file and the environment of its pod; the volume is a folder of this test."""
    folder = tmp_path_factory.mktemp("nats")
    documents = build(FOLDER / "nats")
    text = one(documents, "ConfigMap", "semkv-nats")["data"]["nats.conf"]
    (folder / "nats.conf").write_text(
        text.replace("store_dir: /data", f'store_dir: "{folder}/store"').replace("http: 127.0.0.1:8222", "")
    )
    server = one(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    with nats_example.running(folder / "nats.conf", folder, **resolved(server, secret)) as running:
        yield running


def resolved(of: dict[str, Any], secret: dict[str, str]) -> dict[str, str]:
    """The container's variables as its pod gets them."""
    found = {}
    for entry in of.get("env", []):
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            assert reference["name"] == "semkv-nats"
            found[entry["name"]] = secret[reference["key"]]
        elif "value" in entry:
            found[entry["name"]] = entry["value"]
    return found


def settings(broker: Broker, secret: dict[str, str], folder: str, component: str, where: Path) -> BusConfig:
    """`bus` as a process of that pod reads it, with the Service's name put right for this machine."""
    documents = build(FOLDER / folder)
    (where / "semkv.yaml").write_text(one(documents, "ConfigMap", "semkv")["data"]["semkv.yaml"])
    if component == "semkv-setup-bus":
        used = one(documents, "Job", component)["spec"]["template"]["spec"]["containers"][0]
    else:
        used = container(one(documents, schema.KIND), component)
    env = {name: value for name, value in resolved(used, secret).items() if name.startswith("SEMKV_BUS__")}
    assert "@semkv-nats:4222" in env["SEMKV_BUS__URL"]
    env["SEMKV_BUS__URL"] = env["SEMKV_BUS__URL"].replace("semkv-nats:4222", f"127.0.0.1:{broker.port}")
    return load_config(where / "semkv.yaml", env).config.bus


@pytest.mark.graph
@pytest.mark.parametrize("folder", GRAPHS)
async def test_each_pod_does_the_work_of_its_role_also_where_it_starts_before_the_streams_are_made(
    folder: str, broker: Broker, secret: dict[str, str], tmp_path: Path
) -> None:
    of_setup, of_router, of_worker = (
        settings(broker, secret, folder, name, tmp_path) for name in ("semkv-setup-bus", "SemkvRouter", WORKERS[folder])
    )
    await remove_streams(of_setup)
    async with roles(of_router, of_worker, POD) as both:
        both.say_what_is_kept()
        assert [stream.name for stream in await set_up(of_setup)] == list(STREAMS)
        await until("all four streams", lambda: len({message.subject for message in both.at_router}) == 4)
        await both.hint_arrives()


async def remove_streams(of_setup: BusConfig) -> None:
    client = await nats.connect(of_setup.url, inbox_prefix=of_setup.inbox_prefix)
    for stream in STREAMS:
        await client.request(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout=5)
    await client.close()


@pytest.mark.graph
async def test_a_worker_s_user_may_do_nothing_of_the_router_s(
    broker: Broker, secret: dict[str, str], tmp_path: Path
) -> None:
    of_setup, of_router, of_worker = (
        settings(broker, secret, "aggregated", name, tmp_path)
        for name in ("semkv-setup-bus", "SemkvRouter", "TRTLLMWorker")
    )
    await set_up(of_setup)
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        said.append(str(error).lower())

    client = await nats.connect(of_worker.url, inbox_prefix=of_worker.inbox_prefix, error_cb=on_error)
    try:
        refused = [subjects.routes("r"), subjects.hints(POD), "$JS.API.STREAM.DELETE.SEMKV_ROUTES", "anything"]
        for subject in refused:
            await client.publish(subject, b"")
        for subject in ("semkv.routes.>", "semkv.reports.>", "_INBOX_router.>"):
            await client.subscribe(subject)
        await client.flush()
        await until("each is refused", lambda: len(said) == len(refused) + 3)
        assert all("permissions violation" in text for text in said)
    finally:
        await client.close()
    with pytest.raises(BusError):
        await set_up(of_router)
    seen = await inspect(of_router)  # as `doctor` in a router's pod
    assert (seen.error, seen.jetstream_error) == (None, None)
    assert set(seen.streams) == set(STREAMS)


@pytest.mark.graph
async def test_nobody_comes_in_without_a_password(broker: Broker) -> None:
    with pytest.raises(nats.errors.Error):
        await nats.connect(f"nats://127.0.0.1:{broker.port}", allow_reconnect=False)


def test_permissions_are_those_of_the_example_with_one_user_for_all_workers() -> None:
    def users(path: Path) -> dict[str, str]:
        return {user: " ".join(permissions.split()) for user, _, permissions in PERMISSIONS.findall(path.read_text())}

    shipped, example = users(FOLDER / "nats" / "nats.conf"), users(ROOT / "deploy" / "nats" / "nats.conf")
    assert set(shipped) == {"semkv-setup", "semkv-router", "semkv-worker"}
    for user in ("semkv-setup", "semkv-router"):
        assert shipped[user] == example[user]
    own = example["worker-0"].replace("_INBOX_worker-0", "_INBOX_worker").replace("worker-0.*", "*.*")
    assert shipped["semkv-worker"] == own

    def between_accounts(path: Path, worker: str) -> set[str]:
        return {line.strip() for line in path.read_text().splitlines() if worker in line and "{ s" in line}

    own_lines = between_accounts(ROOT / "deploy" / "nats" / "nats.conf", "worker-0")
    assert len(own_lines) == 8
    renamed = {line.replace("worker-0", "*").replace("WORKER_0", "WORKERS") for line in own_lines}
    assert between_accounts(FOLDER / "nats" / "nats.conf", ".*.*") == renamed
