"""The real connector under the reference engine, with weights and pages on the GPU: what a cold run, the engine's own
cache and the slab give must be the same logits, bit by bit.

Prompts end inside the chunk in which they end cold, so that all three compute the same last chunk by the same kernels.
Pages are full of NaN until something writes them; copies and passes begin late. A random schedule follows: evictions
from pool and slab, chunks, cancellations; its logits may differ in rounding, since chunks fall where the batch leaves
room, and never by more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.bench import MIB, cuda_or_exit, device_name, finish, spin
from tests.gpu.poisoned_pages import Late
from tests.worker_connector.harness import Bench, engine, prompt, run, settings, wait_for
from worker_connector.engine_api.engine import KvCacheLayout
from worker_connector.leader.leader import IDLE_SECONDS
from worker_connector.memory.copy_stream import CopyStream
from worker_connector.reference_engine.engine.config import ConnectorSpec
from worker_connector.reference_engine.models.model_config import LlamaConfig
from worker_connector.reference_engine.models.presets import ModelSource
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.worker import SemkvConnectorWorker

WITH_LOGITS = SamplingParams(return_generation_logits=True)
CHUNK = 64
TOLERANCE = 1e-3
"""Of logits with a spread of about 1: rounding is a thousandth of it, another block's KV a thousand times it."""

SMALL_BLOCKS = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=4096,
)
"""16 KiB a block of 32 tokens: copied by kernels."""
BIG_BLOCKS = LlamaConfig(
    vocab_size=256,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=512,
    max_position_embeddings=4096,
)
"""2 MiB a block: copied by the copy engine."""


def variants() -> dict[str, dict[str, Any]]:
    """Settings of the connector that this build knows."""
    known = settings().connector.__struct_fields__
    found: dict[str, dict[str, Any]] = {"as configured by default": {}}
    if "async_load_min_tokens" in known:
        found["asynchronous loads"] = {"async_load_min_tokens": 32}
    if "trust_layer_hooks" in known:
        found["layer by layer"] = {"trust_layer_hooks": True}
    return found


@dataclass(frozen=True)
class Lateness:
    """What begins late, in milliseconds, and which waits are left out ("load.before", ...)."""

    copies: float = 1.0
    passes: float = 0.0
    without: tuple[str, ...] = ()


def connector(device: torch.device, lateness: Lateness, **options: Any) -> tuple[Bench, ConnectorSpec]:
    delays = random.Random(0)
    bench = Bench(settings(**options), inline=device.type == "cpu")

    def late(inner: CopyStream, which: str) -> Late:
        left_out = [wait.split(".")[1] for wait in lateness.without if wait.startswith(which)]
        return Late(device, inner, lambda: delays.choice([0.0, delays.random() * lateness.copies]), left_out)

    class LateWorker(SemkvConnectorWorker):
        def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
            super().register_kv_caches(kv_cache_tensor)
            self._make_late()

        def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
            super().register_kv_cache_layout(layout)
            self._make_late()

        def _make_late(self) -> None:
            self.rank._stream = late(self.rank._stream, "load")
            self.rank._save_stream = late(self.rank._save_stream, "save")

        def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
            super().wait_for_layer_load(layer_idx, stream)
            if layer_idx == 0:
                spin(device, lateness.passes)  # the engine's stream is the current one

    return bench, bench.spec(worker=LateWorker)


def quiet(bench: Bench) -> None:
    """All saves have landed, and all requests have ended for the connector. For the engine they have ended before; what
    it cancelled in its last iteration is told by none, and the beat, which a bench does not have, would find it."""

    def settled() -> bool:
        for scheduler in bench.schedulers:
            scheduler.leader._last_batch -= 2 * IDLE_SECONDS
            scheduler.leader.sweep_idle()
        numbers = [scheduler.snapshot() for scheduler in bench.schedulers]
        return all(each["tracked"] == each["open_saves"] == 0 for each in numbers)

    wait_for(settled, 30)


def exact(device: torch.device, model: LlamaConfig, manager: str, **options: Any) -> list[str]:
    """What was wrong, by prompt length."""
    wrong = []
    bench, spec = connector(device, Lateness(copies=2.0), slab_bytes=256 * MIB, **options)
    with engine(bench, spec=spec, **engine_options(device, model, manager), num_blocks=48) as running:
        for length in (CHUNK + 20, 4 * CHUNK + 1, 16 * CHUNK + 32):
            tokens, whole = prompt(length, length), length // CHUNK * CHUNK
            _, cold = run(running, tokens, sampling=WITH_LOGITS)
            _, warm = run(running, tokens, sampling=WITH_LOGITS)
            quiet(bench)
            running.reset_prefix_cache()
            _, restored = run(running, tokens, sampling=WITH_LOGITS)
            for name, found, reused in (
                ("warm", warm, warm.stats.device_reused_tokens),
                ("restored", restored, restored.stats.connector_served_tokens),
            ):
                if reused != whole:
                    wrong.append(f"{length} tokens, {name}: {reused} tokens reused, not {whole}")
                elif (difference := _difference(cold, found)) != 0.0:
                    wrong.append(f"{length} tokens, {name}: logits differ from the cold ones by {difference}")
        quiet(bench)
        if faults := _faults(bench):
            wrong.append(faults)
        if options.get("trust_layer_hooks") and not bench.rank.hooks.reliable:
            wrong.append("loads were never waited for layer by layer")
    return wrong


def schedule(
    device: torch.device,
    model: LlamaConfig,
    manager: str,
    *,
    prompts: int = 16,
    lateness: Lateness = Lateness(),
    **options: Any,
) -> dict[str, Any]:
    """Requests that share heads, on a pool and a slab that hold a part of them, some cancelled: how many gave other
    logits than a cold engine."""
    chosen = random.Random(3)
    heads = [prompt(chosen.randint(3, 9) * 32, seed) for seed in range(4)]
    tokens = [heads[n % 4] + prompt(10 + 13 * n, 100 + n) for n in range(prompts)]
    plain = engine_options(device, model, manager) | {"max_num_tokens": 96, "max_batch_size": 4}
    with engine(None, **plain, num_blocks=40) as running:
        expected = [run(running, those, sampling=WITH_LOGITS)[1] for those in tokens]
    block = 2 * model.num_layers * 32 * model.kv_elements_per_token * 4
    bench, spec = connector(device, lateness, slab_bytes=max(48 * block, MIB), **options)
    different, served, worst = 0, 0, 0.0
    with engine(bench, spec=spec, **plain, num_blocks=48) as running:
        for _ in range(3):
            order = chosen.sample(range(prompts), prompts)
            handles = [(n, running.submit(tokens[n], max_new_tokens=4, sampling=WITH_LOGITS)) for n in order]
            cancelled = [running.submit(tokens[n], max_new_tokens=200) for n in order[:4]]
            for handle in cancelled:
                handle.cancel()
            running.reset_prefix_cache()
            for n, handle in handles:
                found = handle.result(60)
                difference = _difference(expected[n], found)
                worst = max(worst, difference)
                different += not difference <= TOLERANCE
                served += found.stats.connector_served_tokens
            for handle in cancelled:
                handle.result(60)
        quiet(bench)
        faults = _faults(bench)
    return {"requests": 3 * prompts, "different": different, "worst": worst, "served_tokens": served, "faults": faults}


def engine_options(device: torch.device, model: LlamaConfig, manager: str) -> dict[str, Any]:
    """For `harness.engine`."""
    return {
        "model": ModelSource(config=model),
        "device": str(device),
        "kv_cache_manager": manager,
        "max_num_tokens": CHUNK,
        "batch_invariant_decode": True,
    }


def _difference(expected: Any, found: Any) -> float:
    """The largest between two sets of logits; infinite for NaN, another length or another number of tokens."""
    pairs = list(zip(expected.stats.generation_logits, found.stats.generation_logits, strict=False))
    if len(pairs) < len(expected.token_ids) or len(expected.token_ids) != len(found.token_ids):
        return float("inf")
    worst = 0.0
    for left, right in pairs:
        difference = float((left - right).abs().max())
        if difference != difference:
            return float("inf")
        worst = max(worst, difference)
        if int(left.argmax()) != int(right.argmax()):
            return worst  # a tie within rounding: what follows continues another text
    return worst


def _faults(bench: Bench) -> str:
    """Of any callback, and copies that the rank could not do."""
    faults = [f"{name} {count}" for s in bench.schedulers for name, count in s.snapshot()["faults"].items()]
    counts = bench.rank.counts
    return ", ".join(faults + [f"{name} {counts[name]}" for name in ("load_errors", "save_errors") if counts[name]])


MUTATIONS = {
    "a pass does not wait for its loads": Lateness(copies=8.0, without=("load.before",)),
    "saves do not wait for the pass": Lateness(copies=0.0, passes=8.0, without=("save.after",)),
}
"""The other two waits take pages that change hands at the right moment; races.py leaves them out too."""


def main() -> None:
    device = cuda_or_exit()
    models = {"16 KiB blocks": SMALL_BLOCKS, "2 MiB blocks": BIG_BLOCKS}
    wrong: dict[str, list[str]] = {}
    schedules: dict[str, Any] = {}
    for name, options in variants().items():
        for size, model in models.items():
            for manager in ("v2",) if options else ("v1", "v2"):
                wrong[f"{size}, {manager}, {name}"] = _tried(
                    lambda m=model, k=manager, o=options: exact(device, m, k, **o)
                )
            schedules[f"{size}, {name}"] = schedule(device, model, "v2", **options)
    caught = {
        mutation: schedule(device, SMALL_BLOCKS, "v2", prompts=8, lateness=lateness)
        for mutation, lateness in MUTATIONS.items()
    }
    unsound = [name for name, found in wrong.items() if found]
    unsound += [
        name for name, found in schedules.items() if found["different"] or found["faults"] or not found["served_tokens"]
    ]
    missed = [name for name, found in caught.items() if not found["different"]]
    finish(
        {
            "device": device_name(device),
            "unsound": unsound,
            "missed_mutations": missed,
            "wrong": wrong,
            "schedules": schedules,
            "caught": caught,
        },
        passed=not unsound and not missed,
    )


def _tried(check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - the other variants are to be run all the same; this one has failed
        return [f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    main()
