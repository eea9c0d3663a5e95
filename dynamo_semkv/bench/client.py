"""Sends chat requests to an OpenAI endpoint and times the first token as a client sees it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynamo_semkv.bench.scenarios import ChatRequest


@dataclass(frozen=True)
class Answer:
    """What the client saw of one request; times in seconds. `request_id` is Dynamo's context id, `None` when no chunk
    came; `error` is the server's own text."""

    request_id: str | None
    ttft_seconds: float | None
    seconds: float
    text: str
    cached_tokens: int | None
    prompt_tokens: int | None
    finish_reason: str | None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer ended with a finish reason and without an error."""
        return self.error is None and self.finish_reason is not None


class ChatClient:
    """One client of one frontend. It opens a connection per request: on a kept one, delayed acknowledgements add some
    40 ms to a small first chunk, which would hide what is measured here."""

    def __init__(self, base_url: str, model: str, timeout_seconds: float = 120.0) -> None:
        self._url = f"{base_url.rstrip('/')}/v1/chat/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def send(self, request: ChatRequest) -> Answer:
        """Sends one request and reads its answer. Never raises for a failed request: the failure is the answer's
        `error`."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(request.messages),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.cache_salt is not None:
            body["nvext"] = {"cache_salt": request.cache_salt}
        seen = _Stream(time.perf_counter())
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=self._timeout, connector=aiohttp.TCPConnector(force_close=True)
                ) as session,
                session.post(self._url, json=body) as response,
            ):
                if response.status != 200:
                    seen.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                else:
                    async for line in response.content:
                        seen.line(line)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        return seen.answer()


class _Stream:
    """Reads the lines of one server-sent event stream."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._first: float | None = None
        self._parts: list[str] = []
        self._id: str | None = None
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self.error: str | None = None

    def line(self, raw: bytes) -> None:
        if not raw.startswith(b"data:"):
            return
        payload = raw[5:].strip()
        if payload == b"[DONE]":
            return
        chunk = json.loads(payload)
        if chunk.get("error"):
            self.error = str(chunk["error"])[:300]
            return
        self._id = self._id or str(chunk.get("id", "")).removeprefix("chatcmpl-") or None
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                self._first = self._first or time.perf_counter()
                self._parts.append(text)
            self._finish = choice.get("finish_reason") or self._finish

    def answer(self) -> Answer:
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            request_id=self._id,
            ttft_seconds=None if self._first is None else self._first - self._started,
            seconds=time.perf_counter() - self._started,
            text="".join(self._parts),
            cached_tokens=details.get("cached_tokens"),
            prompt_tokens=self._usage.get("prompt_tokens"),
            finish_reason=self._finish,
            error=self.error,
        )
