"""Measures prefill and decode throughput of the reference engine with the connector attached and saving, over those
without it.

Two engines, one with the connector, take turns at the same work. In a round each has two slices, A B B A or B A A B, so
that whatever the machine does meanwhile falls on both; the ratio is the median of the rounds' ratios. Both compute with
the same weights in memory, and several such pairs are made, one after the other. Every prompt is new, so nothing is
reused and everything is saved. The connector's cost of a pass does not depend on the model, so two models are measured:
`tiny`, whose passes are shorter than any real one's, and one whose decode passes last about as long as those of an 8B
model on a GPU.

Beside wall time there are two ratios that a busy machine lengthens less: by the processor time of the whole process,
with checksums, scrubbing, reports and donors, and by that of the engine's thread alone, which is how much longer a pass
gets where there are other cores for the rest.

Python's garbage collector is set for both as TensorRT-LLM sets it while its executor runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from worker_connector.assembly import LeaderParts, assemble_leader_with, assemble_rank_with
from worker_connector.background import Background
from worker_connector.bench.rig import DiscardingSink, bench_settings
from worker_connector.rank.rank import Rank
from worker_connector.reference_engine import TINY, ConnectorSpec, Engine, EngineConfig, LlamaConfig, ModelSource
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker

CHUNK = 512
SLAB_BYTES = 256 * 1024 * 1024
GC_THRESHOLD = 20_000
"""Objects of the first generation: TensorRT-LLM's default (`TorchLlmArgs.garbage_collection_gen0_threshold`)."""


@dataclass(frozen=True)
class Throughput:
    """What was measured for one model and phase. Ratios are with the connector over without; below 1 is slower."""

    model: str
    phase: str
    """`prefill` or `decode`."""
    pass_seconds: float
    """Seconds of a batch's decode, or of a chunk's prefill, without the connector."""
    tokens_per_second: float
    """Without the connector."""
    ratio: float
    cpu_ratio: float
    """By processor time of the process."""
    engine_ratio: float
    """By processor time of the engine's thread."""
    saved_blocks: int


def saving_connector() -> tuple[ConnectorSpec, list[Rank]]:
    """The connector as TensorRT-LLM gets it, but without the bus: checksums and scrubbing on the rank's thread, reports
    and donors on the background thread. The list gets the ranks that are made."""
    settings = bench_settings(SLAB_BYTES)
    ranks: list[Rank] = []

    class Scheduler(SemkvConnectorScheduler):
        def _assemble(self, llm_args: Any) -> LeaderParts:
            config = settings.connector
            background = Background(
                "connector-bench", config.report_buffer, config.announce_interval_seconds, lambda: None
            )
            parts = assemble_leader_with(llm_args, settings, DiscardingSink(), background=background)
            background.start()
            return parts

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


ROUNDS = {"tiny": 15, "6 layers": 6}
"""Rounds by model: a slice of `tiny` is over soon, so there can be many."""
PAIRS = 5
"""Pairs of engines, one after the other: where an engine's memory lies changes its passes by up to a tenth."""


def measure(
    model: str, *, rounds: int | None = None, prompt_tokens: int = 512, generated: int = 64, batch: int = 4
) -> list[Throughput]:
    """`model` is a key of `MODELS`. `rounds` are of four slices each, over all pairs; None: as many as `ROUNDS` has for
    the model."""
    config = EngineConfig(
        model=ModelSource(config=MODELS[model]),
        num_blocks=512,
        max_num_tokens=CHUNK,
        num_threads=1,
        max_batch_size=batch,
    )
    rounds = rounds or ROUNDS[model]
    work = _Work(prompt_tokens, generated, batch)
    pairs: dict[str, list[tuple[_Took, _Took]]] = {"prefill": [], "decode": []}
    saved = dict.fromkeys(pairs, 0)
    shares = [len(range(first, rounds, PAIRS)) for first in range(PAIRS)]
    for share in filter(None, shares):
        spec, ranks = saving_connector()
        with Engine(config) as plain, Engine(config, connector=spec, model=plain.model) as connected, _engine_gc():
            for phase, took in pairs.items():
                for engine in (plain, connected):
                    work.run(engine, phase)  # warms up
                before = ranks[0].counts["saved_blocks"]
                took += [work.round(plain, connected, phase, number) for number in range(share)]
                saved[phase] += ranks[0].counts["saved_blocks"] - before
    return [_throughput(model, phase, work, took, saved[phase]) for phase, took in pairs.items()]


def _throughput(model: str, phase: str, work: _Work, pairs: list[tuple[_Took, _Took]], saved: int) -> Throughput:
    alone = statistics.median(without.wall for without, _ in pairs) / 2
    return Throughput(
        model=model,
        phase=phase,
        pass_seconds=alone / work.passes(phase),
        tokens_per_second=work.tokens(phase) / alone,
        ratio=statistics.median(a.wall / b.wall for a, b in pairs),
        cpu_ratio=statistics.median(a.process / b.process for a, b in pairs),
        engine_ratio=statistics.median(a.engine / b.engine for a, b in pairs),
        saved_blocks=saved,
    )


@contextmanager
def _engine_gc() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Took(NamedTuple):
    """Seconds by the clock, and of processor time of the process and of the engine's thread."""

    wall: float
    process: float
    engine: float

    def plus(self, other: _Took) -> _Took:
        return _Took(*(a + b for a, b in zip(self, other, strict=True)))


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

    def round(self, a: Engine, b: Engine, phase: str, number: int) -> tuple[_Took, _Took]:
        """Runs two slices of each, in an order in which a steady change of the machine adds equally to both."""
        outer, inner = (a, b) if number % 2 else (b, a)
        first = self.run(outer, phase)
        middle = self.run(inner, phase).plus(self.run(inner, phase))
        both = first.plus(self.run(outer, phase))
        return (both, middle) if outer is a else (middle, both)

    def run(self, engine: Engine, phase: str) -> _Took:
        """Runs a slice: a batch of new prompts, from the first token to the last of all."""
        length, generated = (self._prompt_tokens, 1) if phase == "prefill" else (16, self._generated)
        prompts = [self._prompt(length) for _ in range(self._batch)]
        before = self._now(engine)
        handles = [engine.submit(prompt, max_new_tokens=generated) for prompt in prompts]
        for handle in handles:
            handle.result(120)
        return _Took(*(now - then for now, then in zip(self._now(engine), before, strict=True)))

    @staticmethod
    def _now(engine: Engine) -> _Took:
        return _Took(time.perf_counter(), time.process_time(), engine.processor_seconds(0))

    def _prompt(self, length: int) -> list[int]:
        self._made += 1
        return [self._made % 500, self._made // 500 % 500] + [
            (self._made * 31 + n * 7) % 500 for n in range(length - 2)
        ]
