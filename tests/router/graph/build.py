"""The parts of a test graph, and the HTTP calls the tests make."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_semkv.bus.server import free_port
from tests.router.graph.model_dir import prompt, write_model_dir
from tests.router.graph.processes import LOOPBACK, WAIT_SECONDS, Graph, Process, wait_until

MODEL = "m"
STATUS_PORT = r"status server bound to: 127\.0\.0\.1:(\d+)"


def http_json(port: int, path: str, body: Any | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """One request; status and parsed body (the text, where it is not JSON). POST when there is a body."""
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def chat_body(
    words: int = 100, start: int = 0, max_tokens: int = 3, stream: bool = False, **more: Any
) -> dict[str, Any]:
    """A chat request of `words` tokens; `nvext` and anything else by keyword."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt(start, words)}],
        "max_tokens": max_tokens,
        "stream": stream,
        **more,
    }


@dataclass
class Answer:
    """What a client saw of one streamed request."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    error: Any = None
    nvext: list[dict[str, Any]] = field(default_factory=list)


def stream_chat(port: int, body: dict[str, Any], look: Callable[[dict[str, Any]], None] | None = None) -> Answer:
    """Send a streamed chat request and read it to its end. Tokens are the numbers of the words; `look` gets each nvext
    at once."""
    answer = Answer()
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=WAIT_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = event["error"]
                continue
            if event.get("nvext"):
                answer.nvext.append(event["nvext"])
                if look is not None:
                    look(event["nvext"])
            for choice in event.get("choices", []):
                answer.tokens += [int(word[1:]) for word in (choice["delta"].get("content") or "").split()]
        if response.status != 200:
            answer.error = response.status
    except OSError as error:
        answer.error = repr(error)
    finally:
        connection.close()
    return answer


class Load:
    """Threads that send streamed requests one after the other until told to stop, and keep what came back."""

    def __init__(self, port: int, threads: int, max_tokens: int) -> None:
        self.answers: list[Answer] = []
        self.expected = list(range(100, 100 + max_tokens))
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(port, max_tokens, number), daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, port: int, max_tokens: int, number: int) -> None:
        start = number * 300
        while not self._stop.is_set():
            start += 7
            self.answers.append(stream_chat(port, chat_body(start=start, max_tokens=max_tokens, stream=True)))

    def wait_for(self, more: int) -> None:
        """Until `more` further answers have come, however long that takes, as long as they come at all."""
        target = len(self.answers) + more
        while (seen := len(self.answers)) < target:
            wait_until(f"more than {seen} answers of {target}", lambda seen=seen: len(self.answers) > seen)

    def finish(self) -> None:
        """Stop, and assert that every request got exactly its tokens, once each and in order."""
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        bad = [answer for answer in self.answers if answer.error or answer.tokens != self.expected]
        assert not bad, f"{len(bad)} of {len(self.answers)}: {bad[:3]}"


class TestGraph:
    """Workers, routers and a frontend over one `Graph`."""

    __test__ = False

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.model_dir = write_model_dir(graph.directory / "model")
        self.frontend_port = 0
        self.nats = graph.start_nats()

    def worker(self, name: str, *arguments: str, **env: str) -> Process:
        return self.graph.python(
            name,
            "-m",
            "tests.router.graph.worker",
            *("--name", name),
            *("--record", str(self.graph.directory / "workers.jsonl")),
            *("--model-dir", str(self.model_dir)),
            *arguments,
            env=self.graph.env(DYN_SYSTEM_PORT="0", DYN_STABLE_ROUTING_ID=f"stable-{name}", **env),
        )

    def router(self, name: str, *arguments: str, **env: str) -> Process:
        return self.graph.python(
            name,
            "-m",
            "tests.router.graph.router",
            *("--name", name),
            *("--record", str(self.graph.directory / "routers.jsonl")),
            *arguments,
            env=self.graph.env(DYN_SYSTEM_PORT="0", **env),
        )

    def frontend(self, routers: int, *arguments: str, **env: str) -> Process:
        """Start the frontend and wait until it serves the public model through `routers` router processes."""
        # Dynamo does not tell a port it chose itself, so one is chosen here, and another if somebody was faster.
        while True:
            self.frontend_port = free_port()
            process = self.graph.python(
                f"frontend-{self.frontend_port}",
                "-m",
                "dynamo.frontend",
                *("--http-port", str(self.frontend_port)),
                *("--namespace", "test"),
                *("--router-mode", "round-robin"),
                *("--migration-limit", "3"),
                *arguments,
                env=self.graph.env(**env),
            )
            # The model is listed some milliseconds before its routes exist, and asking too early is logged as an ERROR.
            found = process.wait_log("chat endpoints enabled|Failed to bind server").group(0)
            if not found.startswith("Failed"):
                break
            process.kill()
            process.log_path.unlink()
        self.wait_routers(routers)
        return process

    def wait_routers(self, routers: int) -> None:
        wait_until(f"{routers} routers in the frontend's view", lambda: self.instances("semkv") == routers)

    def instances(self, component: str) -> int:
        _, health = http_json(self.frontend_port, "/health")
        return sum(1 for it in health["instances"] if (it["component"], it["endpoint"]) == (component, "generate"))

    def chat(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        """A unary chat request."""
        return http_json(self.frontend_port, "/v1/chat/completions", chat_body(**body), headers)

    def stream(self, **body: Any) -> Answer:
        return stream_chat(self.frontend_port, chat_body(stream=True, **body))

    def records(self, who: str, kind: str) -> list[dict[str, Any]]:
        """What workers or routers wrote down, oldest first."""
        path: Path = self.graph.directory / f"{who}.jsonl"
        if not path.exists():
            return []
        whole, _, _ = path.read_text().rpartition("\n")  # the last one may just be being written
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def dispatches(self) -> list[dict[str, Any]]:
        """What the routers' dispatches ended with, once each that began has: a client may have its answer a little
        earlier."""

        def all_ended() -> list[dict[str, Any]]:
            began, ends = self.records("routers", "request"), self.records("routers", "dispatch")
            return ends if len(ends) >= len(began) else []

        return list(wait_until("the end of every dispatch", all_ended))

    def worker_id(self, name: str) -> str:
        """The instance id (decimal text) of the worker last started under `name`."""
        found = wait_until(
            f"worker {name} to be ready", lambda: [r for r in self.records("workers", "ready") if r["worker"] == name]
        )
        return str(found[-1]["id"])

    def status_port(self, process: Process) -> int:
        return int(process.wait_log(STATUS_PORT).group(1))

    def query(self, router: Process, tokens: list[int], namespace: str | None = None, lora: str | None = None) -> Any:
        """What a router's edge tells about a prompt."""
        body = {"token_ids": tokens, "cache_namespace": namespace, "lora_name": lora}
        status, answer = http_json(self.status_port(router), "/engine/query", body)
        assert status == 200, answer
        return answer
