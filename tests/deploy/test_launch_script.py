"""The scripts of graphs/launch bring up a graph that answers, with the CPU engine in GPU workers' place, and take it
down with them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_semkv.bench.client import ChatClient
from dynamo_semkv.bus.server import EmbeddedNats, free_port
from graphs.local.graph import LocalGraph
from graphs.local.settings import GraphSettings
from tests.graphs.test_lifecycle import children, gone
from tests.graphs.traffic import ask, wait_until
from worker_connector.reference_engine.models.model_directory import write_model_directory
from worker_connector.reference_engine.models.presets import ModelSource

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "graphs" / "launch"
SCRIPTS = ["agg_semkv.sh", "disagg_semkv.sh"]
ENGINE = (
    "python3 -m worker_connector.reference_engine --model tiny --model-dir {} --blocks-per-rank 64 "
    "--data-parallel-size 1 --threads 1 --max-num-tokens 512"
)


def workers(script: str, model_dir: Path) -> dict[str, str]:
    engine = ENGINE.format(model_dir)
    if script == "agg_semkv.sh":
        return {"WORKER": f"{engine} --connector on"}
    return {
        "SERVED_MODEL_NAME": "tiny",
        "PREFILL_WORKER": f"{engine} --connector on --disaggregation-mode prefill --served-model-name tiny-prefill",
        "DECODE_WORKER": f"{engine} --connector off --disaggregation-mode decode",
    }


def test_every_script_is_tested() -> None:
    assert {path.name for path in LAUNCH.glob("*_semkv.sh")} == set(SCRIPTS)


@pytest.mark.graph
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_launch_script_serves_and_ends_everything(script: str, tmp_path: Path) -> None:
    http = free_port()
    with EmbeddedNats(tmp_path / "nats") as nats, (tmp_path / "log").open("wb") as log:
        graph = LocalGraph(GraphSettings(model="tiny"), run_dir=tmp_path / "not-started")
        graph.nats = nats
        source = ModelSource(graph.settings.served_model)
        env = graph.environment(
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **workers(script, write_model_directory(source, tmp_path / "models")),
            DYN_HTTP_PORT=str(http),
            SEMKV_CONFIG=str(ROOT / "configs" / "exact.yaml"),
        )
        del env["DYN_FILE_KV"]
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        env["TMPDIR"] = str(temporary)
        process = subprocess.Popen([str(LAUNCH / script)], env=env, stdout=log, stderr=log, start_new_session=True)
        started: list[int] = []
        try:
            client = ChatClient(f"http://127.0.0.1:{http}", graph.settings.served_model)

            def served() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
                text = (tmp_path / "log").read_text()
                complete = script != "disagg_semkv.sh" or "Prefill router target activated" in text
                return complete and "chat endpoints enabled" in text

            wait_until("the model is served", served, 90.0)
            answer = asyncio.run(client.send(ask(1, max_tokens=4)))
            assert answer.error is None
            started = children(process.pid)
            assert len(started) >= 3 + (script == "disagg_semkv.sh")  # frontend, router, a worker of each role
            assert len(list(temporary.glob("dynamo-semkv-discovery-*"))) == 1
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(30.0)
        assert status == 143
        wait_until("everything has ended", lambda: gone(started), 20.0)
    assert list(temporary.glob("dynamo-semkv-discovery-*")) == []


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("named", [True, False])
def test_only_a_discovery_folder_that_it_made_is_removed(tmp_path: Path, named: bool, script: str) -> None:
    """At an end before anything has started: the configuration is refused."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("placement: {mode: nonsense}\n")
    folder = tmp_path / "theirs"
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "NATS_", "SEMKV_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "TMPDIR": str(tmp_path)}
    env |= {"SEMKV_CONFIG": str(bad)} | ({"DYN_FILE_KV": str(folder)} if named else {})
    ended = subprocess.run([str(LAUNCH / script)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "placement.mode" in ended.stdout + ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "theirs"]
