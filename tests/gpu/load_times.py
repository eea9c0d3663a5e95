"""What loads are said to have taken: every report has a time, and it is the time of the copies alone.

The copies are timed by CUDA events on their stream. Neither what the engine had enqueued before them may count (it is
kept busy for much longer than a copy takes), nor may the host wait for them: it must be back while they are still to
come.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.gpu.bench import MIB, Bench, cuda_or_exit, device_name, finish, one_region, scattered, seconds, spin
from tests.gpu.engine_exactness import BIG_BLOCKS, SMALL_BLOCKS, Lateness, connector, engine_options, quiet, variants
from tests.worker_connector.harness import engine, prompt, run
from worker_connector.memory.transfer import copy_to_pages
from worker_connector.reference_engine.models.model_config import LlamaConfig

LATE_MS = 100.0


def measure(device: torch.device, *, blocks: int, block_bytes: int, late_ms: float = LATE_MS) -> dict[str, float]:
    """Seconds: `plain`, of a load with an idle device, by the host's clock; `marked`, of one behind a busy engine, by
    its marks; `behind`, how long the host was at handing it over."""
    bench = Bench.make(device, pages=blocks, slots=blocks, block_bytes=block_bytes, regions=one_region(block_bytes))
    moves = scattered(blocks)

    def load() -> None:
        copy_to_pages(bench.copies, bench.geometry, bench.slab, moves)

    plain = seconds(device, load)
    spin(device, late_ms)
    handed = time.perf_counter()
    bench.copies.after(bench.engine_stream)
    began = bench.copies.mark()
    load()
    ended = bench.copies.mark()
    behind = time.perf_counter() - handed
    ended.wait()
    return {"plain": plain, "marked": ended.seconds_since(began), "behind": behind}


def judged(found: dict[str, float], late_seconds: float) -> list[str]:
    """What was wrong."""
    wrong = []
    if not found["marked"] > 0:
        wrong.append("the marks tell no time")
    if found["marked"] > late_seconds / 2 and found["marked"] > 3 * found["plain"]:
        wrong.append("what ran before the copies counts")
    if found["behind"] > late_seconds / 2 and found["behind"] > 3 * found["plain"]:
        wrong.append("the host waited")
    return wrong


def reported(device: torch.device, model: LlamaConfig, **options: Any) -> list[str]:
    """What was wrong with the times of reports under the reference engine."""
    bench, spec = connector(device, Lateness(copies=0.0), slab_bytes=256 * MIB, **options)
    wrong = []
    with engine(bench, spec=spec, **engine_options(device, model, "v2"), num_blocks=48) as running:
        for length in (84, 544):
            run(running, prompt(length, length))
            quiet(bench)
            running.reset_prefix_cache()
            started = time.perf_counter()
            request_id, _ = run(running, prompt(length, length))
            took = time.perf_counter() - started
            quiet(bench)
            report = bench.report_of(request_id)
            if report.confirmed == 0 or report.load_seconds is None or not 0 < report.load_seconds < took:
                wrong.append(
                    f"{length} tokens: {report.confirmed} confirmed, loaded in {report.load_seconds} of {took} s"
                )
    return wrong


def main() -> None:
    device = cuda_or_exit()
    sizes = {"2 MiB": (32, 2 * MIB), "16 KiB": (1024, MIB // 64)}
    times = {name: measure(device, blocks=blocks, block_bytes=size) for name, (blocks, size) in sizes.items()}
    unsound = [f"{name}: {what}" for name, found in times.items() for what in judged(found, LATE_MS / 1e3)]
    for size, model in (("small blocks", SMALL_BLOCKS), ("big blocks", BIG_BLOCKS)):
        for name, options in variants().items():
            unsound += [f"{size}, {name}: {what}" for what in reported(device, model, **options)]
    finish({"device": device_name(device), "unsound": unsound, "seconds": times}, passed=not unsound)


if __name__ == "__main__":
    main()
