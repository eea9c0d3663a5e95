"""Engines and prompts for the tests: small pools, one thread, pages poisoned until written."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from worker_connector.reference_engine import (
    Behaviours,
    ConnectorSpec,
    Dice,
    Engine,
    EngineConfig,
    LlamaConfig,
    ModelSource,
    SamplingParams,
    SteppedEngine,
)
from worker_connector.reference_engine.engine.executor import Probe

WITH_LOGITS = SamplingParams(return_generation_logits=True)
PATIENCE_S = 60.0
_BEHAVIOURS = {field.name for field in fields(Behaviours)}


def start(
    connector: ConnectorSpec | None = None,
    on_fatal: Callable[[int, BaseException], None] | None = None,
    **changes: Any,
) -> Engine:
    """An engine on `tiny` with 8-token blocks; `changes` are EngineConfig fields."""
    settings: dict[str, Any] = {
        "tokens_per_block": 8,
        "num_blocks": 64,
        "max_num_tokens": 64,
        "num_threads": 1,
        "poison_pages": True,
        "idle_poll_s": None,
    }
    return Engine(EngineConfig(**settings | changes), connector, on_fatal)


def stepped(
    connector: ConnectorSpec | None,
    *,
    probe: Probe | None = None,
    dice: Dice | None = None,
    config: LlamaConfig | None = None,
    **changes: Any,
) -> SteppedEngine:
    """A stepped rank with 8-token blocks; `changes` are fields of EngineConfig or of its `behaviours`."""
    behaviours = {name: changes.pop(name) for name in list(changes) if name in _BEHAVIOURS}
    settings: dict[str, Any] = {
        "model": ModelSource(config=config),
        "tokens_per_block": 8,
        "num_blocks": 64,
        "max_num_tokens": 64,
        "poison_pages": True,
        "behaviours": Behaviours(**behaviours),
    }
    return SteppedEngine(EngineConfig(**settings | changes), connector, probe=probe, dice=dice)


class Script:
    """Dice that a test loads: `on` says per switch how it falls the next times (afterwards never).
    `below` answers every draw of a number."""

    def __init__(self, below: int = 0, **on: list[bool]) -> None:
        self.on = on
        self.result = below

    def hits(self, what: str, rate: float) -> bool:
        falls = self.on.get(what)
        return bool(falls) and falls.pop(0)

    def below(self, what: str, bound: int) -> int:
        return min(self.result, bound - 1)


def prompt(length: int, seed: int = 0, vocabulary: int = 512) -> list[int]:
    """Token ids, by default of the `tiny` vocabulary."""
    return random.Random(seed).choices(range(vocabulary), k=length)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fails the test after a generous deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.002)
