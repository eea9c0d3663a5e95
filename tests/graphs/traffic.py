"""Concurrent chat traffic through a graph, and what its routers know of it afterwards."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from dynamo_semkv.bench.client import Answer, ChatClient
from dynamo_semkv.bench.scenarios import ChatRequest
from graphs.local.graph import LocalGraph

WAIT_SECONDS = 120.0
"""How long a state may take to come, on a machine that has much else to do."""
PATIENT = {"evidence": {"deadline_ms": 1_000.0, "exact_deadline_ms": 1_000.0}}
"""Overrides: the budgets at their longest. A lookup that came late because the machine was busy is not what these tests
are about."""


def prompt(seed: int, words: int = 60) -> str:
    """Text that shares no run with another seed's."""
    return " ".join(f"{seed * 7919 + i * 104729:x}" for i in range(words))


def ask(seed: int, max_tokens: int = 64, salt: str | None = None) -> ChatRequest:
    return ChatRequest(({"role": "user", "content": prompt(seed)},), salt, max_tokens)


def send(graph: LocalGraph, request: ChatRequest) -> Answer:
    return asyncio.run(ChatClient(graph.frontend_url, graph.settings.served_model).send(request))


class Traffic:
    """Streams from `threads` clients, each with its own few prompts in turn, until `finish`."""

    def __init__(
        self, graph: LocalGraph, threads: int = 4, max_tokens: int = 64, first_seed: int = 0, prompts: int = 5
    ) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self.began: dict[str | None, float] = {}
        """When each request that was answered was sent, by the clock of `time.monotonic`."""
        self._max_tokens = max_tokens
        self._prompts = prompts
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(graph, first_seed + 100 * number), daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, graph: LocalGraph, seed: int) -> None:
        turn = 0
        while not self._stop.is_set():
            this, began = seed + turn % self._prompts, time.monotonic()
            answer = send(graph, ask(this, self._max_tokens))
            self.began[answer.request_id] = began
            self.answers.append((this, answer))
            turn += 1

    def wait_for(self, more: int) -> None:
        """Until so many further answers have come, however long that takes, as long as they come at all."""
        target = len(self.answers) + more
        while (seen := len(self.answers)) < target:
            wait_until(f"more than {seen} answers of {target}", lambda seen=seen: len(self.answers) > seen)  # type: ignore[misc]

    def sent_before(self, moment: float) -> set[str | None]:
        return {request_id for request_id, began in self.began.items() if began < moment}

    def stop(self) -> list[tuple[int, Answer]]:
        """Every answer, whatever it says."""
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        return self.answers

    def finish(self) -> list[tuple[int, Answer]]:
        """Every answer; fails if one was lost, cut or differs from another answer to the same prompt (all are
        greedy)."""
        self.stop()
        bad = [answer for _, answer in self.answers if not answer.ok or answer.finish_reason != "length"]
        assert not bad, f"{len(bad)} of {len(self.answers)} failed, the first: {bad[0]}"
        texts: dict[int, set[str]] = {}
        for seed, answer in self.answers:
            texts.setdefault(seed, set()).add(answer.text)
        different = {seed: found for seed, found in texts.items() if len(found) > 1}
        assert not different, f"one prompt, two greedy answers: {different}"
        return self.answers


class Leaving:
    """A client that hangs up on each of its streams after the first line, until `finish`."""

    def __init__(self, graph: LocalGraph, first_seed: int) -> None:
        self.left = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(graph, first_seed), daemon=True)
        self._thread.start()

    def _run(self, graph: LocalGraph, seed: int) -> None:
        while not self._stop.is_set():
            seed += 1
            messages = [{"role": "user", "content": prompt(seed)}]
            asked = {
                "model": graph.settings.served_model,
                "messages": messages,
                "max_tokens": 200,
                "stream": True,
            }
            request = urllib.request.Request(
                f"{graph.frontend_url}/v1/chat/completions",
                json.dumps(asked).encode(),
                {"content-type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    self.left += bool(response.readline())
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)  # while a part is away it may be refused; those who stay are counted elsewhere

    def finish(self) -> int:
        """How many streams were left."""
        self._stop.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        return self.left


def wait_until(
    what: str, condition: Callable[[], Any], seconds: float = WAIT_SECONDS, detail: Callable[[], str] = lambda: ""
) -> Any:
    """The first true value; fails naming `what`, and `detail` as it is then."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what} {detail()}"
        time.sleep(0.05)


def read(url: str, timeout: float = 30.0) -> bytes:
    """A page as it is. One that is asked too often answers 429, and is asked again; any other failure is raised."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as refused:
            if refused.code != HTTPStatus.TOO_MANY_REQUESTS:
                raise
        time.sleep(0.1)


def get(url: str) -> dict[str, Any]:
    """JSON of a page; `{}` for one that is not there (yet)."""
    try:
        parsed: dict[str, Any] = json.loads(read(url))
        return parsed
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def post(url: str, body: Any, **headers: str) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **headers}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        parsed: dict[str, Any] = json.load(response)
        return parsed


def forget_device(graph: LocalGraph) -> None:
    """Every worker's device cache is empty; host memory keeps what it has."""
    for worker in graph.worker_names:
        post(f"{graph.status_url(worker)}/engine/reset_prefix_cache", {})


def routes(graph: LocalGraph, router: str, request_id: str | None) -> list[dict[str, Any]]:
    """What one router knows of one request: closed routes, an attempt each."""
    found: list[dict[str, Any]] = get(f"{graph.page_url(router)}/api/requests/{request_id}").get("routes", [])
    return found


def snapshot(graph: LocalGraph, router: str = "router-0") -> dict[str, Any]:
    return get(f"{graph.page_url(router)}/api/snapshot")
