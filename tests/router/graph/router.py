"""A router process of the tests: the edge, with a handler as thin as one can be. Run as a module.

A request's annotation `pin:<worker>:<rank>` makes the handler pin; everything else goes where Dynamo likes. What the
dispatch told is appended to the record file as JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.runtime.logging import configure_dynamo_logging

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import as_tokens
from dynamo_semkv.router.ingress import strip_client_hints
from dynamo_semkv.router.runtime import DynamoEdge, token_ids_list
from dynamo_semkv.router.runtime_errors import RequestFailed
from dynamo_semkv.router.runtime_settings import EdgeSettings
from dynamo_semkv.router.runtime_types import CallContext, Chunk, Request
from tests.router.iterated import iterated


class Service:
    def __init__(self, edge: DynamoEdge, name: str, record: Path) -> None:
        self.edge = edge
        self.name = name
        self.record_path = record

    def record(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "router": self.name, **fields}) + "\n"
        with self.record_path.open("ab", buffering=0) as out:  # in one piece: several processes write to this file
            out.write(line.encode())

    async def generate(self, request: Request, call: CallContext) -> AsyncIterator[Chunk]:
        clean, stripped = strip_client_hints(request)
        pin = None
        for annotation in clean.get("annotations") or []:
            if annotation.startswith("pin:"):
                _, worker, rank = annotation.split(":")
                pin = ReplicaKey(int(worker), int(rank))
        clean["extra_args"] = {**(clean.get("extra_args") or {}), "semkv": {"route": f"{self.name}-{time.time_ns()}"}}
        tokens = as_tokens(token_ids_list(clean))
        dispatch = self.edge.dispatch(clean, pin, annotate={"router": self.name}, tokens=tokens)
        outcome = "closed"
        self.record("request", id=call.request_id, metadata=dict(call.metadata), stripped=stripped, request=request)
        try:
            async for chunk in iterated(dispatch):
                yield chunk
            outcome = "done"
        except RequestFailed as failure:
            outcome = failure.kind.value
            raise
        finally:
            self.record(
                "dispatch",
                id=call.request_id,
                outcome=outcome,
                replica=[str(part) for part in dispatch.replica] if dispatch.replica else None,
                pinned=dispatch.pinned,
                fallback=dispatch.fallback,
                chunks=dispatch.chunks,
                finish_reason=dispatch.finish_reason,
                engine_data=dispatch.engine_data,
                usage=dispatch.usage,
                timing=dispatch.timing,
                stopped=call.is_stopped(),
            )

    async def advise(self, request: Request, call: CallContext) -> AsyncIterator[Chunk]:
        """A second endpoint of the component: an answer without a worker."""
        choice = await self.edge.best_choice(token_ids_list(request))
        yield {"worker_id": str(choice.replica.worker_id), "dp_rank": choice.replica.dp_rank, "id": call.request_id}

    async def query(self, body: dict[str, Any]) -> dict[str, Any]:
        """Engine route: what the edge tells about a prompt."""
        tokens = token_ids_list(body)
        namespace, lora = body.get("cache_namespace"), body.get("lora_name")
        overlap, loads = await self.edge.exact(tokens, namespace, lora)
        try:
            choice = await self.edge.best_choice(tokens, namespace, lora)
        except RequestFailed:
            choice = None
        live = self.edge.live_replicas()
        return {
            "overlap": {
                f"{k.worker_id}/{k.dp_rank}": list(overlap.ranks.get(k, (0, 0, 0))) for k in {**live, **overlap.ranks}
            },
            "prompt_blocks": overlap.prompt_blocks,
            "loads": {f"{k.worker_id}/{k.dp_rank}": list(v) for k, v in loads.items()},
            "choice": [str(choice.replica.worker_id), choice.replica.dp_rank, choice.overlap_blocks]
            if choice
            else None,
            "live": {
                f"{k.worker_id}/{k.dp_rank}": [
                    c.stable_routing_id,
                    c.block_size,
                    c.total_kv_blocks,
                    dict(c.runtime_data),
                    sorted(c.taints),
                    c.role.value,
                ]
                for k, c in live.items()
            },
            "instance_id": str(self.edge.instance_id),
            "inflight": self.edge.inflight,
        }


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--namespace", default="test")
    parser.add_argument("--component", default="semkv")
    parser.add_argument("--model-name", default="m")
    parser.add_argument("--load-thresholds", default="{}")
    parser.add_argument("--kv-router", default="{}")
    arguments = parser.parse_args()
    configure_dynamo_logging()
    edge = await DynamoEdge.connect(
        EdgeSettings(
            worker_endpoint=f"{arguments.namespace}.backend.generate",
            router_endpoint=f"{arguments.namespace}.{arguments.component}.generate",
            model_name=arguments.model_name,
            wait_workers_s=60,
            suspect_s=60,
            kv_router=json.loads(arguments.kv_router),
            load_thresholds=json.loads(arguments.load_thresholds),
        )
    )
    service = Service(edge, arguments.name, Path(arguments.record))
    edge.expose_route("query", service.query)
    edge.expose_metrics(lambda: f"# TYPE semkv_test_inflight gauge\nsemkv_test_inflight {edge.inflight}\n")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    serving = asyncio.ensure_future(edge.serve(service.generate, {"advise": service.advise}))
    stopping = asyncio.ensure_future(stop.wait())
    service.record("ready", id=str(edge.instance_id))
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await edge.shutdown(grace_s=20.0)
    await serving


if __name__ == "__main__":
    uvloop.run(main())
