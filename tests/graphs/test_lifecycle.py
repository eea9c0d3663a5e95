"""Graphs come up beside each other and take everything with them when they end: told to, killed, or failing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphs.local.graph import GraphError, LocalGraph
from graphs.local.settings import GraphSettings
from tests.graphs.traffic import get, wait_until

pytestmark = [pytest.mark.graph, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def children(pid: int) -> list[int]:
    """Live descendants of a process, itself left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        direct = [child for child, of in parents.items() if of == parent]
        found += direct
        queue += direct
    return found


def gone(pids: list[int]) -> bool:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not any(alive(pid) for pid in pids)


class Command:
    """`python -m graphs.local up` with one worker and no connector."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.run_dir = folder / "run"
        self.log = folder / "output.log"
        folder.mkdir()
        options = ["--model", "tiny", "--workers", "1", "--connector", "off", "--print-env", "--engine-niceness", "0"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "graphs.local",
                    "up",
                    *options,
                    "--run-dir",
                    self.run_dir,
                    "--model-dir",
                    model_dir,
                ],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.log.read_text()

    def wait_up(self) -> None:
        wait_until("graph up", lambda: "stays up" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()
        self.pids = children(self.process.pid)
        assert len(self.pids) == 4, self.pids  # nats-server, worker, router, frontend
        found = re.search(r"http://127\.0\.0\.1:(\d+)(?!.*Page)", self.text().split("Frontend:")[1])
        assert found
        self.port = int(found.group(1))

    def serves(self) -> bool:
        return bool(get(f"http://127.0.0.1:{self.port}/v1/models").get("data"))


def test_two_graphs_side_by_side_end_without_a_trace(tmp_path: Path, model_dir: Path) -> None:
    commands = [Command(tmp_path / name, model_dir) for name in ("told", "killed")]
    told, killed = commands
    try:
        for command in commands:
            command.wait_up()
            assert command.serves()
        assert told.port != killed.port
        assert f"export DYN_FILE_KV={told.run_dir}/discovery" in told.text()
        assert f"export SEMKV_CONFIG={told.run_dir}/semkv.yaml" in told.text()

        for part in ("nats-server", "worker-0", "router-0", "frontend"):
            assert f"Starting: {part}\n" in told.text()
        wait_until("where things are", lambda: "Bus:" in told.text())
        said = dict(re.findall(r"^(Mode|Configuration|Logs|Bus): +(\S+)$", told.text(), re.MULTILINE))
        file = told.run_dir / "semkv.yaml"
        assert (said["Mode"], said["Configuration"], said["Logs"]) == ("enforce", str(file), str(told.run_dir))
        assert said["Bus"] in file.read_text()
        page = re.search(r"Page: (\S+)", told.text())
        assert page
        file.write_text(file.read_text().replace("mode: enforce", "mode: shadow"))
        wait_until("the mode of the edited file", lambda: get(f"{page[1]}/api/snapshot").get("mode") == "shadow")

        told.process.send_signal(signal.SIGTERM)
        assert told.process.wait(60) in (0, 130)
        assert gone(told.pids)
        assert killed.serves(), "the other graph is not touched"

        killed.process.kill()  # no handler runs: the kernel ends the children
        killed.process.wait()
        wait_until("children gone", lambda: gone(killed.pids))
    finally:
        for command in commands:
            command.process.kill()
            command.process.wait()


def test_ctrl_c_during_start_ends_everything(tmp_path: Path, model_dir: Path) -> None:
    command = Command(tmp_path / "graph", model_dir)
    try:
        wait_until("all parts started", lambda: len(children(command.process.pid)) == 4)
        pids = children(command.process.pid)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
        assert gone(pids)
    finally:
        command.process.kill()
        command.process.wait()


@pytest.mark.parametrize("module", ["argparse", "aiohttp", "numpy"])
def test_ctrl_c_while_it_imports_says_nothing(
    module: str, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # a line on stderr for each module that was imported
    command = Command(tmp_path / "graph", model_dir)
    try:
        wait_until(f"{module} imported", lambda: re.search(rf"\| +{module}$", command.text(), re.MULTILINE))
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
        assert "Traceback" not in command.text()
    finally:
        command.process.kill()
        command.process.wait()


def test_a_part_that_fails_names_itself_and_takes_the_others_down(tmp_path: Path, model_dir: Path) -> None:
    settings = GraphSettings(model="tiny", workers=1, connector=False, overrides={"bus": {"nonsense": 1}})
    graph = LocalGraph(settings, run_dir=tmp_path / "run", model_dir=model_dir)
    before = set(children(os.getpid()))
    with pytest.raises(GraphError, match=r"router-0 ended with status \d+(?s:.*)nonsense"):
        graph.up()
    assert set(children(os.getpid())) <= before
    assert not graph.nats.running
