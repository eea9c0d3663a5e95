"""The best bare Python router: what any router in Python costs, and nothing else. Push egress, no buffer, one KvRouter,
nothing per chunk.

A program of its own: `python -m dynamo_semkv.bench.router.bare WORKER_ENDPOINT ROUTER_ENDPOINT MODEL BLOCK_SIZE
MODEL_DIR`. It does not survive what ours does (a lost pin, n > 1, typed failures): it is a lower bound, not a router to
use.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import (
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelType,
    RouterConfig,
    RouterMode,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime, dynamo_worker


@dynamo_worker()  # type: ignore[untyped-decorator]
async def main(runtime: DistributedRuntime) -> None:
    """Serves until it is killed; `dynamo_worker` passes the runtime."""
    worker, public, model, block_size, model_dir = sys.argv[1:]
    workers = runtime.endpoint(worker)
    client = await workers.client()
    await client.wait_for_instances()
    router = KvRouter(endpoint=workers, block_size=int(block_size), kv_router_config=KvRouterConfig())

    async def push(request: Any, response_sender: Any) -> AsyncIterator[Any]:
        stream = await router.generate_from_request(request, response_buffer_size=0)
        first = True
        async for chunk in stream:
            if (
                first
            ):  # the frontend logs an error for every request whose worker is not the instance that it sent it to
                first = False
                if isinstance(chunk.get("routing_data"), dict):
                    chunk["routing_data"].pop("worker_id", None)
            response_sender.send(chunk)
        response_sender.close()
        return
        yield  # type: ignore[unreachable]  # makes this an async generator, which is what Dynamo drives

    def generate(request: Any, context: Any = None, response_sender: Any = None) -> AsyncIterator[Any]:
        return push(request, response_sender)

    endpoint = runtime.endpoint(public)
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate, graceful_shutdown=True))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model_dir,
        model,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=int(block_size),
        router_config=RouterConfig(RouterMode.RoundRobin),
        ignore_weights=True,
    )
    await serving


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
