"""One attention data-parallel rank of the reference engine as a process of its own, with its own leader and its own way
to the bus.

Run as `python -m tests.worker_connector.data_parallel_rank RANK RANKS`, with SEMKV_CONFIG and DYN_STABLE_ROUTING_ID.
Each line of its input is a prompt as JSON, or `forget` (its device cache is emptied); to each it answers with one line.
It ends with its input.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from tests.worker_connector.harness import SMALL
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig
from worker_connector.reference_engine.engine.fair_lock import FairLock
from worker_connector.reference_engine.engine.rank import Rank
from worker_connector.reference_engine.engine.request import LlmRequest, RequestOptions
from worker_connector.reference_engine.models.presets import ModelSource, load_model
from worker_connector.reference_engine.models.sampling import SamplingParams
from worker_connector.scheduler import SemkvConnectorScheduler
from worker_connector.worker import SemkvConnectorWorker


def answer(rank: Rank, number: int, prompt: list[int]) -> dict[str, Any]:
    """What the engine says of one request: the tokens, and how many the connector served."""
    tokens: list[int] = []
    served = 0
    over = threading.Event()

    def deliver(token_ids: list[int], finish_reason: str | None, stats: Any) -> None:
        nonlocal served
        tokens.extend(token_ids)
        served = stats.connector_served_tokens

    options = RequestOptions(max_new_tokens=4, sampling=SamplingParams())
    rank.submit(LlmRequest(number, prompt, options, None), deliver, over.set)
    over.wait()
    return {"tokens": tokens, "served": served}


def main(number: int, ranks: int) -> None:
    config = EngineConfig(
        model=ModelSource(config=SMALL), num_blocks=64, max_num_tokens=256, num_threads=1, data_parallel_size=ranks
    )
    model = load_model(config.model, config.device)
    spec = ConnectorSpec(SemkvConnectorScheduler, SemkvConnectorWorker)
    rank = Rank(number, config, model, spec, FairLock(), lambda rank, error: sys.exit(f"rank {rank}: {error}"))
    rank.start()
    print(json.dumps({"ready": number}), flush=True)
    for count, line in enumerate(sys.stdin):
        if line.strip() == "forget":
            rank.drop_cached()
            print(json.dumps({}), flush=True)
        else:
            print(json.dumps(answer(rank, count + 1, json.loads(line))), flush=True)
    rank.stop()
    rank.join(30.0)
    assert rank.connector is not None
    for part in (rank.connector.scheduler, rank.connector.worker):
        part.shutdown()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
