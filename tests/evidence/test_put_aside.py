"""The optional providers themselves, real index and real pipeline, whose model raises, is late or never answers: each
lookup comes back, the provider is put aside, and it comes back when its model does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.config.evidence import EmbeddingConfig, SemBlendConfig
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.evidence.deadline import DeadlineRunner, LookupStatus
from dynamo_semkv.evidence.embedding import EmbeddingProvider
from dynamo_semkv.evidence.encoder import OnnxEncoder, TokenizerFile
from dynamo_semkv.evidence.semblend import SemBlendProvider, new_pipeline
from dynamo_semkv.testing import ManualClock
from tests.bus.waiting import until
from tests.evidence import test_embedding as embedding
from tests.evidence import test_semblend_provider as semblend
from tests.evidence.documents import namespace, query_of
from tests.evidence.test_deadline import AMPLE
from tests.evidence.tiny_models import write_encoder

SHORT = 0.05
ENTERED = 0.5
"""A deadline before which the model is sure to have been asked."""
HIT, ERROR, TIMEOUT, SKIPPED = LookupStatus.HIT, LookupStatus.ERROR, LookupStatus.TIMEOUT, LookupStatus.SKIPPED
A = namespace("a")


class Faulty:
    """An encoder, or SemBlend's pipeline, that does what `how` says: `well`, `raises`, or `waits` until it is let go.
    SemBlend's embedder is no place for faults: its pipeline catches them and compares words instead."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.how = "well"
        self.go = threading.Event()

    def encode(self, texts: Any, length: int) -> Any:
        return self._do(lambda: self._model.encode(texts, length))

    def find_donor(self, *arguments: Any, **more: Any) -> Any:
        return self._do(lambda: self._model.find_donor(*arguments, **more))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _do(self, work: Callable[[], Any]) -> Any:
        if self.how == "raises":
            raise RuntimeError("no model today")
        if self.how == "waits":
            self.go.wait(AMPLE)
        return work()


class Setting:
    def __init__(self, kind: str, models: Path) -> None:
        self.clock = ManualClock()
        self._asked = 0
        if kind == "embedding":
            self.model = Faulty(OnnxEncoder(models))
            windows = EmbeddingConfig(window_tokens=32, budget_ms=1_000.0, query_windows=4, min_similarity=0.6)
            # Windows cost nothing by this clock, so what a late lookup took does not keep the next one from trying.
            self.provider: Any = EmbeddingProvider(windows, self.model, TokenizerFile(models), clock=lambda: 0.0)
            embedding.learn(self.provider, "d", embedding.words(1))
            self._prompt: Callable[[int], TokenArray] = lambda n: embedding.paraphrased(embedding.words(1), n)
        else:
            config = SemBlendConfig()
            self.model = Faulty(new_pipeline(config, semblend.BagOfWords()))
            self.provider = SemBlendProvider(
                config, semblend.BagOfWords(), TokenizerFile(models), lambda config, embedder: self.model
            )
            semblend.learn(self.provider, "d", semblend.words(1))
            # Another end each time: SemBlend remembers what it embedded.
            self._prompt = lambda n: np.concatenate((semblend.words(1)[:-64], semblend.words(5_000 + n, 64)))
        self.runner = DeadlineRunner([self.provider], AMPLE, 8, breaker_clock=self.clock)

    async def lookup(self, deadline: float = AMPLE) -> LookupStatus:
        self.runner.set_limits(deadline, 8, 1)
        self._asked += 1
        return (await self.runner.lookup(query_of(self._prompt(self._asked), A))).status

    async def let_go(self) -> None:
        """The lookup that waits ends, and the provider's thread is free for the next one."""
        self.model.go.set()
        await until("the thread is free", lambda: not self.state["stuck"])
        self.model.go.clear()

    @property
    def state(self) -> dict[str, Any]:
        (state,) = self.runner.snapshot().values()
        return dict(state)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["embedding", "semblend"])
def setting(request: pytest.FixtureRequest, models: Path) -> Iterator[Setting]:
    made = Setting(request.param, models)
    yield made
    made.model.go.set()
    made.runner.close(timeout=10.0)


async def test_a_model_that_raises_puts_its_provider_aside_until_it_works_again(setting: Setting) -> None:
    assert await setting.lookup() is HIT
    setting.model.how = "raises"
    assert [await setting.lookup() for _ in range(7)] == [ERROR] * 5 + [SKIPPED] * 2
    setting.clock.advance(1.0)
    assert [await setting.lookup() for _ in range(2)] == [ERROR, SKIPPED], "one trial, which failed"
    setting.model.how = "well"
    setting.clock.advance(1.9)
    assert await setting.lookup() is SKIPPED, "the pause doubled"
    setting.clock.advance(0.1)
    assert [await setting.lookup() for _ in range(2)] == [HIT] * 2
    assert (setting.state["breaker"], setting.state["opened"]) == ("closed", 2)


async def test_a_model_that_is_always_late_puts_its_provider_aside_until_it_is_quick_again(setting: Setting) -> None:
    setting.model.how = "waits"
    for _ in range(5):
        assert await setting.lookup(SHORT) is TIMEOUT
        await setting.let_go()
    setting.model.how = "well"
    assert await setting.lookup() is SKIPPED
    setting.clock.advance(1.0)
    assert await setting.lookup() is HIT
    assert setting.state["breaker"] == "closed"


async def test_a_model_that_never_answers_costs_one_deadline_and_nobody_waits_for_it_again(setting: Setting) -> None:
    setting.model.how = "waits"
    assert await setting.lookup(ENTERED) is TIMEOUT
    assert [await setting.lookup(AMPLE) for _ in range(3)] == [SKIPPED] * 3, "it is still inside the first one"
    assert setting.state["stuck"]
    setting.model.how = "well"
    await setting.let_go()
    assert await setting.lookup() is HIT
    assert setting.state["late"] <= 1
