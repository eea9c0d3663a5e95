"""Compares log-probabilities of SmolLM2's answers, to the last bit, when the prompt's KV is computed, found on the
device, or loaded from host memory by the connector. Runs in this process, on the reference engine, without Dynamo.

    aligned     the prompt ends shortly behind a chunk, so the cold run computes its last chunk as the others do: equal
                bit by bit
    unaligned   the cold run's last chunk begins elsewhere: floating point adds in another order there, whatever
                loaded the KV
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from dynamo_semkv.bench.corpus import installed
from dynamo_semkv.bench.report.library import Library
from worker_connector.bench.throughput import saving_connector
from worker_connector.reference_engine import Engine, EngineConfig, ModelSource
from worker_connector.reference_engine.models.gguf_file import TokenizerData
from worker_connector.reference_engine.models.model_directory import build_tokenizer, tiny_tokenizer_data
from worker_connector.reference_engine.models.presets import SMOLLM2_NAME, TINY_NAME, smollm2_file
from worker_connector.reference_engine.models.sampling import SamplingParams

CHUNK = 512
PATIENCE_SECONDS = 180.0
SAVED_SECONDS = 30.0
_WITH_LOGITS = SamplingParams(return_generation_logits=True)


def exactness(*, quick: bool = False, generated: int = 16) -> list[dict[str, Any]]:
    """One item for each prompt. `quick`: the tiny model and a short prompt."""
    name, chunks = (TINY_NAME, 1) if quick else (SMOLLM2_NAME, 4)
    tokenizer = build_tokenizer(_tokenizer_data(name))
    lengths = {"aligned": chunks * CHUNK + 20, "unaligned": chunks * CHUNK - 100}
    library = Library(12 * chunks * CHUNK * len(lengths), installed())
    spec, _ = saving_connector()
    config = EngineConfig(model=ModelSource(name), num_blocks=chunks * 16 + 16, max_num_tokens=CHUNK, num_threads=2)
    with Engine(config, connector=spec) as engine:
        found = []
        for what, length in lengths.items():
            tokens = tokenizer.encode(library.take(6 * length).text).ids[:length]
            if len(tokens) < length:
                raise ValueError(f"tokens: got {len(tokens)} of the text, {length} are needed")
            runs = {"cold": _run(engine, tokens, generated), "warm": _run(engine, tokens, generated)}
            _wait_saved(engine, length // 32)
            engine.reset_prefix_cache()
            runs["loaded"] = _run(engine, tokens, generated)
            found.append({"model": name, "prompt": what, "tokens": length, **_compared(runs)})
    return found


def _tokenizer_data(name: str) -> TokenizerData:
    return tiny_tokenizer_data() if name == TINY_NAME else smollm2_file().tokenizer()


def _run(engine: Engine, tokens: Sequence[int], generated: int) -> Any:
    return engine.submit(tokens, max_new_tokens=generated, sampling=_WITH_LOGITS).result(PATIENCE_SECONDS)


def _wait_saved(engine: Engine, blocks: int) -> None:
    """Waits until host memory has the prompt; RuntimeError after SAVED_SECONDS."""
    deadline = time.monotonic() + SAVED_SECONDS
    while True:
        snapshot: dict[str, Any] = engine.connector_scheduler(0).snapshot()  # type: ignore[union-attr]
        ledger = snapshot["ledger"] or {}
        if not snapshot["open_saves"] and ledger.get("resident", 0) >= blocks:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the prompt was not saved: {ledger}")
        time.sleep(0.02)


def _compared(runs: dict[str, Any]) -> dict[str, Any]:
    """The largest absolute difference of any log-probability of any token of the vocabulary, and the answer's
    perplexity."""
    logs = {name: torch.stack(run.stats.generation_logits).double().log_softmax(-1) for name, run in runs.items()}
    ids = runs["cold"].token_ids
    return {
        "loaded_tokens": runs["loaded"].stats.connector_served_tokens,
        "warm_tokens": runs["warm"].stats.device_reused_tokens,
        "same_tokens": all(run.token_ids == ids for run in runs.values()),
        "max_difference_warm_cold": _largest(logs["warm"], logs["cold"]),
        "max_difference_loaded_cold": _largest(logs["loaded"], logs["cold"]),
        "max_difference_loaded_warm": _largest(logs["loaded"], logs["warm"]),
        **{
            f"perplexity_{name}": _perplexity(log, run.token_ids)
            for (name, run), log in zip(runs.items(), logs.values(), strict=True)
        },
    }


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    n = min(len(a), len(b))
    return float((a[:n] - b[:n]).abs().max())


def _perplexity(log: torch.Tensor, ids: Sequence[int]) -> float:
    """Perplexity of the run's own answer: exp of its mean negative log-probability."""
    return math.exp(-float(log[range(len(ids)), list(ids)].mean()))
