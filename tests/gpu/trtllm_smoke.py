"""The connector under TensorRT-LLM: `python -m tests.gpu.trtllm_smoke --model DIR`

Greedy outputs must be equal: without a connector, with one that does nothing (over more tokens than a block has, so
that blocks are completed while decoding), and with ours cold, warm from the engine's own cache, and restored from the
slab after that cache was overrun. Warm and restored start their forward pass at the same token, so their logits must be
equal bit by bit.

Exit status 3, with a message, where tensorrt_llm is not installed or no model was named. The logic runs on anything
that is a `Subject`; a test has the reference engine for one.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from tests.gpu.bench import cuda_or_exit, device_name, finish
from tests.gpu.run_all import CANNOT_RUN
from worker_connector.connector import SemkvConnectorScheduler, SemkvConnectorWorker
from worker_connector.engine_api.engine import KvCacheConnectorScheduler, KvCacheConnectorWorker

KINDS = ("none", "no-op", "semkv")
CACHE_TOKENS = 8_192
SCHEDULERS: list[SemkvConnectorScheduler] = []
"""Ours, as TensorRT-LLM makes them: in this process, see `TrtLlm`."""


class Answer(NamedTuple):
    token_ids: list[int]
    logits: torch.Tensor | None
    """[generated tokens, vocabulary], where the engine returns them."""


class Subject(Protocol):
    """An engine with one of the `KINDS` of connector."""

    tokens_per_block: int

    def generate(self, tokens: Sequence[int], max_new_tokens: int) -> Answer: ...

    def overrun_cache(self) -> None:
        """Nothing of what was computed so far is left in the engine's own cache."""

    def served_tokens(self) -> int:
        """By the connector, so far."""

    def close(self) -> None: ...


class NoOpScheduler(KvCacheConnectorScheduler):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> object:
        return ()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return False


class NoOpWorker(KvCacheConnectorWorker):
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    def register_kv_cache_layout(self, layout: Any) -> None: ...

    def start_load_kv(self, stream: Any) -> None: ...

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    def wait_for_save(self, stream: Any) -> None: ...

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []


class KnownScheduler(SemkvConnectorScheduler):
    """Ours, and this script can ask it."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        SCHEDULERS.append(self)


KnownWorker = SemkvConnectorWorker


def compare(start: Callable[[str], Subject], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """`wrong`: what differed, in words."""
    wrong: list[str] = []
    plain = _all_of(start, "none", prompts)
    no_op = _all_of(start, "no-op", prompts)
    wrong += [f"prompt {n}: a connector that does nothing changes the output" for n in _different(plain, no_op)]
    subject = start("semkv")
    try:
        generated = 2 * subject.tokens_per_block + 3
        cold = [subject.generate(prompt, generated) for prompt in prompts]
        warm = [subject.generate(prompt, generated) for prompt in prompts]
        subject.overrun_cache()
        before = subject.served_tokens()
        restored = [subject.generate(prompt, generated) for prompt in prompts]
        served = subject.served_tokens() - before
    finally:
        subject.close()
    for name, answers in (("cold", cold), ("warm", warm), ("restored", restored)):
        wrong += [f"prompt {n}: {name} differs from the engine without a connector" for n in _different(plain, answers)]
    for n, (left, right) in enumerate(zip(warm, restored, strict=True)):
        if left.logits is not None and right.logits is not None and not torch.equal(left.logits, right.logits):
            wrong.append(f"prompt {n}: logits of restored are not those of warm")
    if served <= 0:
        wrong.append("nothing was served from the slab")
    return {"prompts": len(prompts), "served_tokens": served, "wrong": wrong}


def _all_of(start: Callable[[str], Subject], kind: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    subject = start(kind)
    try:
        return [subject.generate(prompt, 2 * subject.tokens_per_block + 3) for prompt in prompts]
    finally:
        subject.close()


def _different(left: Sequence[Answer], right: Sequence[Answer]) -> list[int]:
    return [n for n, (a, b) in enumerate(zip(left, right, strict=True)) if a.token_ids != b.token_ids]


class TrtLlm:
    """TensorRT-LLM's LLM API, with the worker in this process (`TLLM_WORKER_USE_SINGLE_PROCESS`)."""

    tokens_per_block = 32

    def __init__(self, model: str, kind: str) -> None:
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi import KvCacheConfig
        from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

        names = {"no-op": ("NoOpScheduler", "NoOpWorker"), "semkv": ("KnownScheduler", "KnownWorker")}
        connector = None
        if kind != "none":
            scheduler, worker = names[kind]
            connector = KvCacheConnectorConfig(
                connector_module="tests.gpu.trtllm_smoke",
                connector_scheduler_class=scheduler,
                connector_worker_class=worker,
            )
        self._llm = LLM(
            model=model,
            backend="pytorch",
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=True,
                enable_partial_reuse=False,
                max_tokens=CACHE_TOKENS,
                tokens_per_block=self.tokens_per_block,
            ),
            **({} if connector is None else {"kv_connector_config": connector}),
        )
        self._fill = random.Random(1)

    def generate(self, tokens: Sequence[int], max_new_tokens: int) -> Answer:
        from tensorrt_llm import SamplingParams

        options = SamplingParams(
            max_tokens=max_new_tokens, temperature=0.0, ignore_eos=True, return_generation_logits=True
        )
        output = self._llm.generate({"prompt_token_ids": list(tokens)}, sampling_params=options).outputs[0]
        logits = output.generation_logits
        return Answer(list(output.token_ids), None if logits is None else logits.cpu())

    def overrun_cache(self) -> None:
        for _ in range(2 * CACHE_TOKENS // 1_024):
            self.generate([self._fill.randint(10, 10_000) for _ in range(1_024)], 1)

    def served_tokens(self) -> int:
        # TensorRT-LLM imports this file by its name, beside the `__main__` that it is.
        made = importlib.import_module("tests.gpu.trtllm_smoke").SCHEDULERS
        return sum(int(s.snapshot()["attempt_counts"].get("confirmed_tokens", 0)) for s in made)

    def close(self) -> None:
        self._llm.shutdown()


def _cannot(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(CANNOT_RUN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a small model in Hugging Face form")
    options = parser.parse_args()
    device = cuda_or_exit()
    if importlib.util.find_spec("tensorrt_llm") is None:
        _cannot("tensorrt_llm is not installed here; nothing was compared")
    model = options.model or os.environ.get("SEMKV_SMOKE_MODEL")
    if not model:
        _cannot("name a model: --model DIR, or SEMKV_SMOKE_MODEL")
    os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    os.environ.setdefault("DYN_STABLE_ROUTING_ID", "smoke")
    os.environ.setdefault("SEMKV_CONNECTOR__SLAB_BYTES", str(1 << 30))
    chosen = random.Random(0)
    prompts = [[chosen.randint(10, 10_000) for _ in range(length)] for length in (40, 200, 1_000)]
    result = compare(lambda kind: TrtLlm(model, kind), prompts)
    finish({"device": device_name(device), "unsound": result["wrong"], **result}, passed=not result["wrong"])


if __name__ == "__main__":
    main()
