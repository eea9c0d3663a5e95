"""A Dynamo worker without an engine: it records what it was asked and streams scripted tokens.

Run as a script. Token ``k`` of a request whose prompt has ``n`` tokens is ``(n + k) % WORDS``, so a continued
(migrated) stream is recognisable: the tokens go on where the first attempt was cut.

Control (system status server, POST JSON):
    /engine/kv      {"rank", "events": [...]}           publish raw KV events of one rank through its ZMQ relay
    /engine/load    {"rank", "active_decode_blocks"}    publish one rank's load
    /engine/fail    {"after", "kind"}                   the next request fails after that many chunks
    /engine/update/model_taints {"taints": [...]}       Dynamo's own: replace the taints on the card
An annotation `hold:<seconds>` delays the first chunk, as a long prefill does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
from dynamo.common.model_taints import register_model_taint_route
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
)
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from dynamo.runtime import DistributedRuntime, dynamo_worker

from tests.router.graph.model_dir import WORDS

FAILURES = {"shutdown": EngineShutdown, "invalid": InvalidArgument}


class RankRelay:
    """The ZMQ socket of one rank that Dynamo's publisher relays (a PUB bound to loopback, port of its own choice)."""

    def __init__(self, endpoint: Any, rank: int, block_size: int) -> None:
        self.rank = rank
        self.sequence = 0
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.publisher = KvEventPublisher(
            endpoint=endpoint,
            kv_block_size=block_size,
            dp_rank=rank,
            enable_local_indexer=True,
            zmq_endpoint=f"tcp://127.0.0.1:{port}",
            zmq_topic="",
        )

    def wait_subscribed(self) -> None:
        """Block until Dynamo's relay has subscribed: what a PUB sends before that is lost without a trace."""
        if not self.socket.poll(60_000):
            raise RuntimeError(f"rank {self.rank}: no subscription on the KV event socket within 60 s")
        self.socket.recv()

    def send(self, events: list[Any]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, self.rank])
        self.socket.send_multipart([b"", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1


class Worker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.fail: dict[str, Any] | None = None
        self.relays: list[RankRelay] = []
        self.metrics = WorkerMetricsPublisher()

    def record(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "worker": self.arguments.name, **fields}) + "\n"
        with Path(self.arguments.record).open(
            "ab", buffering=0
        ) as out:  # in one piece: several processes write to this file
            out.write(line.encode())

    def generate(self, request: dict[str, Any], context: Any = None, response_sender: Any = None) -> Any:
        if self.arguments.pull or response_sender is None:
            return self.stream(request, context)
        return self.push(request, context, response_sender)

    async def push(self, request: dict[str, Any], context: Any, response_sender: Any) -> Any:
        async for chunk in self.stream(request, context):
            response_sender.send(chunk)
        response_sender.close()
        if False:
            yield

    async def stream(self, request: dict[str, Any], context: Any) -> Any:
        self.record("request", context=context.id(), request=request)
        prompt = request["token_ids"]
        limit = request["stop_conditions"].get("max_tokens") or 16
        fail, self.fail = self.fail, None
        sent = 0
        try:
            for annotation in request.get("annotations") or []:
                if annotation.startswith("hold:"):
                    await self.hold(float(annotation.removeprefix("hold:")), context)
            while sent < limit:
                if context.is_stopped():
                    self.record("stopped", context=context.id(), sent=sent)
                    return
                if fail is not None and sent >= fail["after"]:
                    raise FAILURES[fail["kind"]]("scripted failure")
                sent += 1
                for index in range(1, request["sampling_options"].get("n") or 1):
                    yield self.choice(prompt, sent, limit, index)
                yield self.choice(prompt, sent, limit, 0)
                if sent < limit:
                    await asyncio.sleep(self.arguments.delay_s)
            if fail is not None and fail["after"] >= limit:
                raise FAILURES[fail["kind"]]("scripted failure")
        finally:
            self.record("end", context=context.id(), sent=sent)

    @staticmethod
    def choice(prompt: list[int], sent: int, limit: int, index: int) -> dict[str, Any]:
        chunk: dict[str, Any] = {"token_ids": [(len(prompt) + sent - 1) % WORDS], "index": index}
        if sent == limit:
            chunk["finish_reason"] = "length"
            chunk["engine_data"] = {"kv_cache_hit": {"prompt_tokens": len(prompt), "reused_tokens": 0}}
            chunk["completion_usage"] = {
                "prompt_tokens": len(prompt),
                "completion_tokens": sent,
                "total_tokens": len(prompt) + sent,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        return chunk

    @staticmethod
    async def hold(seconds: float, context: Any) -> None:
        """A long prefill: no chunk for `seconds`, unless the request is stopped."""
        stopped = context.async_killed_or_stopped()
        await asyncio.wait((asyncio.ensure_future(stopped),), timeout=seconds)

    async def engine_kv(self, body: dict[str, Any]) -> dict[str, Any]:
        self.relays[int(body["rank"])].send(body["events"])
        return {"sent": len(body["events"])}

    async def engine_load(self, body: dict[str, Any]) -> dict[str, Any]:
        self.metrics.publish(dp_rank=int(body["rank"]), active_decode_blocks=int(body["active_decode_blocks"]))
        return {}

    async def engine_fail(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fail = body
        return {}

    async def run(self, runtime: DistributedRuntime) -> None:
        arguments = self.arguments
        endpoint = runtime.endpoint(arguments.endpoint)
        runtime.register_engine_route("kv", self.engine_kv)
        runtime.register_engine_route("load", self.engine_load)
        runtime.register_engine_route("fail", self.engine_fail)
        config = ModelRuntimeConfig()
        config.data_parallel_size = arguments.ranks
        config.data_parallel_start_rank = 0
        config.total_kv_blocks = 4096
        config.max_num_seqs = 64
        config.max_num_batched_tokens = 8192
        config.enable_local_indexer = True
        config.set_engine_specific("semkv_probe", json.dumps({"worker": arguments.name}))
        await register_model(
            ModelInput.Tokens,
            ModelType.Empty,
            endpoint,
            arguments.model_dir,
            arguments.model_name,
            worker_type=getattr(WorkerType, arguments.role),
            needs={"Prefill": [[WorkerType.Decode]], "Decode": [[WorkerType.Prefill]]}.get(arguments.role),
            kv_cache_block_size=arguments.block_size,
            runtime_config=config,
        )
        register_model_taint_route(runtime, endpoint)
        self.relays = [RankRelay(endpoint, rank, arguments.block_size) for rank in range(arguments.ranks)]
        await self.metrics.create_endpoint(endpoint)
        for relay in self.relays:
            await asyncio.to_thread(relay.wait_subscribed)
        self.record("ready", id=str(endpoint.connection_id()), pid=os.getpid())
        await endpoint.serve_endpoint(self.generate, graceful_shutdown=True)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--model-name", default="m", help="name on the hidden card; the router offers it by default")
    parser.add_argument("--endpoint", default="test.backend.generate")
    parser.add_argument("--role", default="Aggregated", choices=["Aggregated", "Prefill", "Decode"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--pull", action="store_true")
    await Worker(parser.parse_args()).run(runtime)


if __name__ == "__main__":
    uvloop.run(main())
