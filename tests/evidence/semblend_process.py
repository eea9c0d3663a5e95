"""A process that is SemBlend's emitter and nothing else: `python semblend_process.py` with a script as JSON on stdin.

The script: `url`, `flavour` (`dynamo` or `trtllm`), `worker_id`, `generation`, and `steps`, a list of `[name,
arguments]`. Every event is built by SemBlend's own code and published by it, as JSON over core NATS on its own subject.
Only the embedder is ours, a list of floats given with each donor: SemBlend's would download a model.

`semblend/__init__.py` imports the whole product, and torch if it is there; the emitter needs numpy alone. So the
packages on the way to it are put in place without running their `__init__`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from typing import Any

import nats


def bare_package(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{name} is not installed")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package


class GivenEmbedding:
    """The embedder that SemBlend asks: the vector of the donor at hand, or None."""

    def __init__(self) -> None:
        self.vector: list[float] | None = None

    def embed(self, text: str) -> list[float] | None:
        return self.vector


def dynamo_events(script: dict[str, Any]) -> list[dict[str, Any]]:
    from semblend.integration.dynamo import semantic_events

    embedder = GivenEmbedding()
    namespace = semantic_events.CacheNamespace(**script["namespace"])
    emitter = semantic_events.SemBlendEventEmitter(
        script["worker_id"], namespace, embedder, provider_generation=script["generation"]
    )
    events = []
    for step, given in script["steps"]:
        if step == "reset":
            events.append(emitter.reset_head())
        elif step == "register":
            embedder.vector = given.pop("embedding")
            events.append(emitter.donor_registered(given.pop("donor_id"), given.pop("tokens"), "text", **given))
        else:
            events.append(emitter.donor_evicted(**given))
    return [event for event in events if event is not None]


def trtllm_events(script: dict[str, Any]) -> list[dict[str, Any]]:
    bare_package("semblend.integration.trtllm")
    from semblend.integration.trtllm import semantic_types as wire
    from semblend.integration.trtllm.events import TrtllmContractEmitter
    from semblend.integration.trtllm.namespace import bind_tenant_key, build_cache_namespace

    events: list[dict[str, Any]] = []
    namespace = build_cache_namespace(**script["namespace"])
    generation = script["generation"]
    emitter = TrtllmContractEmitter(
        worker_id=script["worker_id"], namespace=namespace, sink=events.append, provider_generation=generation
    )
    emitter._embedder = embedder = GivenEmbedding()

    def publish(data: Any) -> None:
        """As the emitter does it for registrations: it has no method for the other kinds."""
        events.append(wire.SemanticKvEvent(1, emitter._next_id(), script["worker_id"], 0, data).to_dict())

    for step, given in script["steps"]:
        if step == "reset":
            emitter.generation_reset()
        elif step == "register":
            embedder.vector = given["embedding"]
            tokens = given["tokens"]
            donor = wire.DonorRegistered(
                given["donor_id"],
                bind_tenant_key(namespace, given["cache_salt"]),
                wire.DonorLocation.worker(0, 0),
                len(tokens),
                (wire.DonorSegment(0, (0, len(tokens)), 0),),
                generation,
            )
            emitter.donor_registered(donor, prompt_text="text", token_ids=tokens)
        elif step == "purge":
            publish(wire.DonorsPurged(given["scope"], generation))
        else:
            publish(wire.DonorRelocated(given["donor_id"], wire.DonorLocation(**given["location"]), generation))
    return events


async def main() -> None:
    script = json.load(sys.stdin)
    bare_package("semblend")
    from semblend.integration.dynamo.semantic_events import publish

    events = (dynamo_events if script["flavour"] == "dynamo" else trtllm_events)(script)
    client = await nats.connect(script["url"])
    for event in events:
        await publish(client, event)
    await client.drain()
    json.dump({"published": len(events), "torch": "torch" in sys.modules}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
