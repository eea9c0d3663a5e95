"""Prefill and decode throughput of the reference engine with the connector attached and saving, over those without it.

Two engines, one with the connector, take turns at the same work, in an order that changes; the ratio is the median of the rounds'. Every
prompt is new, so nothing is reused and everything is saved. The connector's cost of a pass does not depend on the model, so two are
measured: `tiny`, whose passes are shorter than any real one's, and one whose decode passes last about as long as those of an 8B model on
a GPU. By CPU time: the same from the processor time of the whole process, seals
and scrub included, which a busy machine does not lengthen.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from worker_connector.assembly import LeaderParts, assemble_leader_with, assemble_rank_with
from worker_connector.bench.rig import DiscardingSink, bench_settings
from worker_connector.rank import Rank
from worker_connector.reference_engine import TINY, ConnectorSpec, Engine, EngineConfig, LlamaConfig, ModelSource
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

CHUNK = 512
SLAB_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Throughput:
    model: str
    phase: str
    """`prefill` or `decode`."""
    pass_seconds: float
    """Of a batch's decode, or of a chunk's prefill, without the connector."""
    tokens_per_second: float
    """Without the connector."""
    ratio: float
    cpu_ratio: float
    saved_blocks: int


def saving_connector() -> tuple[ConnectorSpec, list[Rank]]:
    """As TensorRT-LLM gets it, but for the bus: seals and scrub on the rank's thread."""
    settings = bench_settings(SLAB_BYTES)
    ranks: list[Rank] = []

    class Scheduler(SemkvConnectorScheduler):
        def _assemble(self, llm_args: Any) -> LeaderParts:
            return assemble_leader_with(llm_args, settings, DiscardingSink())

    class Worker(SemkvConnectorWorker):
        def _assemble(self, llm_args: Any) -> Rank:
            ranks.append(assemble_rank_with(llm_args, settings))
            return ranks[-1]

    return ConnectorSpec(Scheduler, Worker), ranks


MODELS = {
    "tiny": TINY,
    "6 layers": LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1024,
        max_position_embeddings=4096,
    ),
}


def measure(
    model: str, *, rounds: int = 7, prompt_tokens: int = 512, generated: int = 64, batch: int = 4
) -> list[Throughput]:
    """`model`: of `MODELS`."""
    config = EngineConfig(
        model=ModelSource(config=MODELS[model]),
        num_blocks=512,
        max_num_tokens=CHUNK,
        num_threads=1,
        max_batch_size=batch,
    )
    spec, ranks = saving_connector()
    with Engine(config) as plain, Engine(config, connector=spec) as connected:
        work = _Work(prompt_tokens, generated, batch)
        found = []
        for phase in ("prefill", "decode"):
            walls, cpus, alone = [], [], []
            saved = ranks[0].counts["saved_blocks"]
            for number in range(rounds + 1):
                pair = [plain, connected] if number % 2 else [connected, plain]
                took = {id(engine): work.run(engine, phase) for engine in pair}
                if number:  # the first one warms up
                    (wall, cpu), (wall_with, cpu_with) = took[id(plain)], took[id(connected)]
                    walls.append(wall / wall_with)
                    cpus.append(cpu / cpu_with)
                    alone.append(wall)
            found.append(
                Throughput(
                    model=model,
                    phase=phase,
                    pass_seconds=statistics.median(alone) / work.passes(phase),
                    tokens_per_second=work.tokens(phase) / statistics.median(alone),
                    ratio=statistics.median(walls),
                    cpu_ratio=statistics.median(cpus),
                    saved_blocks=ranks[0].counts["saved_blocks"] - saved,
                )
            )
        return found


class _Work:
    def __init__(self, prompt_tokens: int, generated: int, batch: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._generated = generated
        self._batch = batch
        self._made = 0

    def tokens(self, phase: str) -> int:
        return self._batch * (self._prompt_tokens if phase == "prefill" else self._generated)

    def passes(self, phase: str) -> int:
        return -(-self.tokens(phase) // CHUNK) if phase == "prefill" else self._generated

    def run(self, engine: Engine, phase: str) -> tuple[float, float]:
        """(seconds, processor seconds) of a batch of new prompts."""
        length, generated = (self._prompt_tokens, 1) if phase == "prefill" else (16, self._generated)
        prompts = [self._prompt(length) for _ in range(self._batch)]
        started, cpu = time.perf_counter(), time.process_time()
        handles = [engine.submit(prompt, max_new_tokens=generated) for prompt in prompts]
        for handle in handles:
            handle.result(120)
        return time.perf_counter() - started, time.process_time() - cpu

    def _prompt(self, length: int) -> list[int]:
        self._made += 1
        return [self._made % 500, self._made // 500 % 500] + [
            (self._made * 31 + n * 7) % 500 for n in range(length - 2)
        ]
