"""The embedding provider with a real encoder runtime and a real vector index; only the model is tiny."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dynamo_semkv.config.evidence import EmbeddingConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.evidence.donor import Epoch
from dynamo_semkv.evidence.embedding import EmbeddingProvider
from dynamo_semkv.evidence.encoder import OnnxEncoder, TokenizerFile, Vectors
from dynamo_semkv.evidence.vectors import VectorIndex
from tests.bus.waiting import wait_for
from tests.evidence.documents import namespace, query_of
from tests.evidence.donors import donor
from tests.evidence.tiny_models import DIMENSION, WORDS, onnx_lookup, write_encoder

A, B = namespace("a"), namespace("b")
WINDOW = 32


def words(seed: int, tokens: int = 512) -> TokenArray:
    """A document about its own sixty words."""
    rng = np.random.default_rng(seed)
    own = rng.choice(np.arange(1, WORDS), 60, replace=False)
    return rng.choice(own, tokens).astype(np.uint32)


def paraphrased(tokens: TokenArray, seed: int = 0) -> TokenArray:
    """In windows of 32 the same words in another order."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(part) for part in np.split(tokens, len(tokens) // WINDOW)])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(models: Path) -> Iterator[Callable[..., EmbeddingProvider]]:
    made: list[EmbeddingProvider] = []

    def build(
        encoder: OnnxEncoder | None = None, clock: Callable[[], float] | None = None, **fields: object
    ) -> EmbeddingProvider:
        settings = {"window_tokens": WINDOW, "budget_ms": 1_000.0, "query_windows": 4, "min_similarity": 0.6, **fields}
        config = EmbeddingConfig(**settings)  # type: ignore[arg-type]
        given = {"clock": clock} if clock is not None else {}
        made.append(EmbeddingProvider(config, encoder or OnnxEncoder(models), TokenizerFile(models), **given))
        return made[-1]

    yield build
    for provider in made:
        provider.close()


def learn(
    provider: EmbeddingProvider, name: str, tokens: TokenArray, where: CacheNamespace = A, *, epoch: Epoch | None = None
) -> None:
    """As it happens: the prompt is routed, the donor announced, the thread does its part."""
    provider.prompt_routed(query_of(tokens, where))
    provider.donor_added(donor(name, tokens, where, **({"epoch": epoch} if epoch else {})))
    wait_for("embedded", lambda: settled(provider))


def settled(provider: EmbeddingProvider) -> bool:
    counts = provider.counts
    return counts["queued"] == counts["indexed"] + counts["stale"] + counts["failed"]


def test_a_paraphrase_finds_its_donor_and_claims_no_place(make: Callable[..., EmbeddingProvider]) -> None:
    provider = make()
    for n in range(8):
        learn(provider, f"d{n}", words(n))
    prompt = paraphrased(words(5))
    assert not np.array_equal(prompt, words(5))
    (match,) = provider.lookup(query_of(prompt, A))
    assert match.donor_id == "d5"
    assert match.match_type is MatchType.SEMANTIC_CANDIDATE
    assert (match.segments, match.exact_prefix_tokens, match.provider) == ((), 0, "embedding")
    assert 0 < match.reusable_token_count <= len(prompt)
    assert 0.0 < match.quality_signals["similarity"] <= 1.0
    assert match.quality_signals["windows_alike"] <= match.quality_signals["windows"]
    assert match.metadata == {"donor_tokens": len(words(5))}
    assert provider.lookup(query_of(words(99), A)) == []


@pytest.mark.parametrize("first", ["prompt", "donor"])
def test_prompt_and_donor_join_in_either_order(make: Callable[..., EmbeddingProvider], first: str) -> None:
    provider, tokens = make(), words(1)
    steps: list[Callable[[], None]] = [
        lambda: provider.prompt_routed(query_of(tokens, A)),
        lambda: provider.donor_added(donor("d", np.concatenate((tokens, words(77, 96))), A)),
    ]
    for step in steps if first == "prompt" else reversed(steps):
        step()
    wait_for("embedded", lambda: settled(provider) and len(provider) == 1)
    assert [match.donor_id for match in provider.lookup(query_of(paraphrased(tokens), A))] == ["d"]


def test_a_donor_of_a_prompt_that_was_never_here_has_no_text(make: Callable[..., EmbeddingProvider]) -> None:
    provider = make()
    begins_alike = np.concatenate((words(1, 128), words(2, 384)))
    provider.prompt_routed(query_of(begins_alike, A))
    provider.donor_added(donor("other", np.concatenate((words(1, 128), words(3, 384))), A))
    assert provider.counts["queued"] == 0
    assert provider.snapshot()["routed"]["waiting"] == 1


def test_removal_and_the_end_of_a_life(make: Callable[..., EmbeddingProvider]) -> None:
    provider, epoch = make(), Epoch("g1")
    learn(provider, "gone", words(1))
    learn(provider, "over", words(2), epoch=epoch)
    learn(provider, "stays", words(3))
    provider.donor_removed("gone")
    assert provider.lookup(query_of(words(1), A)) == []
    epoch.end()
    assert provider.lookup(query_of(words(2), A)) == [], "not creditable, though nobody removed it yet"
    assert [match.donor_id for match in provider.lookup(query_of(words(3), A))] == ["stays"]
    provider.donor_removed("over")
    provider.donor_removed("stays")
    assert provider.snapshot()["partitions"] == 0


class SlowEncoder:
    """The real one, held at a gate."""

    def __init__(self, encoder: OnnxEncoder) -> None:
        self._encoder, self.gate, self.entered = encoder, threading.Event(), threading.Event()
        self.dimension = encoder.dimension

    def encode(self, texts: Sequence[str], length: int) -> Vectors:
        self.entered.set()
        assert self.gate.wait(30)
        return self._encoder.encode(texts, length)


def test_a_registration_whose_generation_ended_while_it_was_embedded_is_dropped(
    make: Callable[..., EmbeddingProvider], models: Path
) -> None:
    encoder = SlowEncoder(OnnxEncoder(models))
    provider, epoch = make(encoder), Epoch("g1")
    provider.prompt_routed(query_of(words(1), A))
    provider.donor_added(donor("d", words(1), A, epoch=epoch))
    assert encoder.entered.wait(30)
    epoch.end()
    encoder.gate.set()
    wait_for("dropped", lambda: provider.counts["stale"] == 1)
    assert (len(provider), provider.snapshot()["partitions"]) == (0, 0)


def test_a_relocated_donor_keeps_its_vectors(make: Callable[..., EmbeddingProvider]) -> None:
    provider, tokens = make(), words(1)
    known = donor("d", tokens, A)
    provider.prompt_routed(query_of(tokens, A))
    provider.donor_added(known)
    wait_for("embedded", lambda: settled(provider))
    moved = replace(donor("d", tokens, A, worker=9), sketch=known.sketch)
    provider.donor_added(moved)
    (match,) = provider.lookup(query_of(tokens, A))
    assert match.location == moved.location
    assert provider.counts["queued"] == 1


def test_what_all_donors_begin_with_finds_nobody(make: Callable[..., EmbeddingProvider]) -> None:
    provider, template = make(query_windows=8), words(50, 256)
    for n in range(12):
        learn(provider, f"d{n}", np.concatenate((template, words(n, 256))))
    found = provider.lookup(query_of(np.concatenate((template, paraphrased(words(7, 256)))), A))
    assert [match.donor_id for match in found] == ["d7"]
    assert provider.lookup(query_of(np.concatenate((template, words(80, 256))), A)) == []


def test_no_more_windows_than_the_budget_pays_for(make: Callable[..., EmbeddingProvider]) -> None:
    """Each look at this clock is 10 ms after the last one, so a lookup seems to take 10 ms, and there are 5."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.010
        return now[0]

    provider = make(clock=clock, budget_ms=5.0, query_windows=8)
    learn(provider, "d", words(1))
    answered = []
    for n in range(200):
        answered.append(bool(provider.lookup(query_of(paraphrased(words(1), n), A))))
    assert 0 < provider.counts["no_time"] < 200
    assert True in answered[:3], "while windows were thought to be cheap"
    assert True in answered[100:], "and tried again now and then"


class Counting:
    """An encoder that counts the windows that it read."""

    def __init__(self, encoder: OnnxEncoder) -> None:
        self._encoder = encoder
        self.dimension = encoder.dimension
        self.windows = 0

    def encode(self, texts: Sequence[str], length: int) -> Vectors:
        self.windows += len(texts)
        return self._encoder.encode(texts, length)


def test_a_window_is_read_once_for_each_tenant(make: Callable[..., EmbeddingProvider], models: Path) -> None:
    """A donor's windows were those of its prompt, the next turn begins with the same ones: only what is new costs
    anything. Another tenant's lookup costs what it would without the first one: its time tells nothing."""
    encoder = Counting(OnnxEncoder(models))
    provider = make(encoder=encoder, query_windows=64)
    learn(provider, "d", words(1, 512))
    assert encoder.windows == 16
    provider.lookup(query_of(words(1, 512), A))
    assert encoder.windows == 16
    provider.lookup(query_of(np.concatenate((words(1, 512), words(2, 64))), A))
    assert encoder.windows == 18
    learn(provider, "theirs", words(1, 512), B)
    assert encoder.windows == 34
    assert provider.counts["remembered"] == 32


def test_what_is_no_more_alike_than_everybody_is_no_match(make: Callable[..., EmbeddingProvider]) -> None:
    """Twelve donors that speak of the same sixty words, a stranger that does too: alike, and not more so to one than to
    the others."""
    provider = make(min_lead=0.1, min_similarity_alone=0.6)
    own = np.random.default_rng(1).choice(np.arange(1, WORDS), 60, replace=False)
    said = [np.random.default_rng(100 + n).choice(own, 512).astype(np.uint32) for n in range(13)]
    for n, tokens in enumerate(said[:12]):
        learn(provider, f"d{n}", tokens)
    assert provider.lookup(query_of(said[12], A)) == []
    assert [match.donor_id for match in provider.lookup(query_of(paraphrased(said[3]), A))] == ["d3"]
    lenient = make(min_lead=0.0, min_similarity_alone=0.6)
    for n, tokens in enumerate(said[:12]):
        learn(lenient, f"d{n}", tokens)
    assert lenient.lookup(query_of(said[12], A)), "they are alike enough"


def test_of_two_texts_that_are_equally_alike_neither_is_meant(make: Callable[..., EmbeddingProvider]) -> None:
    """Each donor has half of what the prompt says. Where only one of them has it, it is meant, and so is its copy on
    another replica."""
    both = np.concatenate((words(1, 256), words(2, 256)))
    halves = {
        "one": np.concatenate((words(1, 256), words(8, 256))),
        "other": np.concatenate((words(9, 256), words(2, 256))),
    }
    settings = {"min_similarity": 0.3, "min_similarity_alone": 0.95, "min_lead": 0.05}
    provider, sure = make(**settings), make(**settings)
    for n in range(20, 32):
        for each in (provider, sure):
            learn(each, f"d{n}", words(n))
    for name, tokens in halves.items():
        learn(provider, name, tokens)
    assert provider.lookup(query_of(both, A)) == []
    for name in ("one", "copy"):
        learn(sure, name, halves["one"])
    assert {match.donor_id for match in sure.lookup(query_of(both, A))} == {"one", "copy"}


def test_the_queue_and_the_store_are_bounded(make: Callable[..., EmbeddingProvider]) -> None:
    provider = make(max_donors=3)
    for n in range(6):
        learn(provider, f"d{n}", words(n))
    assert len(provider) == 3
    assert provider.counts["crowded_out"] == 3
    assert provider.lookup(query_of(words(0), A)) == []
    assert [match.donor_id for match in provider.lookup(query_of(words(5), A))] == ["d5"]


def test_an_unknown_tenant_has_no_donors(make: Callable[..., EmbeddingProvider]) -> None:
    provider = make()
    learn(provider, "d", words(1))
    assert provider.lookup(query_of(words(1), namespace(None))) == ()
    provider.prompt_routed(query_of(words(2), namespace(None)))
    assert len(provider._prompts) == 1


def test_vectors_of_another_dimension_or_not_finite_are_refused() -> None:
    index = VectorIndex(4)
    index.add(0, 0, np.eye(4, dtype=np.float32))
    with pytest.raises(ValueError, match=r"allowed: \[n, 4\]"):
        index.add(1, 0, np.eye(5, dtype=np.float32))
    with pytest.raises(ValueError, match="not finite"):
        index.add(1, 0, np.full((1, 4), np.nan, np.float32))
    near = index.near(np.eye(4, dtype=np.float32)[:1], 8)
    assert (near.rows[0, 0], near.windows[0, 0]) == (0, 0)
    assert set(near.rows[0, 4:].tolist()) == {-1}
    index.remove(0, range(4))
    assert (len(index), index.near(np.eye(4, dtype=np.float32), 2).rows.max()) == (0, -1)


def test_the_encoder_is_the_mean_of_its_tokens(models: Path) -> None:
    encoder = OnnxEncoder(models)
    vectors = encoder.encode(["w1 w2 w3", "w3 w1 w2", "", "w4", "w1 w2 w3 w9 w9"], 3)
    assert vectors.shape == (5, DIMENSION)
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-6)
    assert vectors[0] == pytest.approx(vectors[4], abs=1e-6)
    assert not vectors[2].any()
    assert np.linalg.norm(vectors[[0, 1, 3]], axis=1) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(("missing", "names"), [("model.onnx", "model.onnx"), ("tokenizer.json", "tokenizer.json")])
def test_a_missing_file_is_named(tmp_path: Path, missing: str, names: str) -> None:
    write_encoder(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ContractError, match=rf"evidence\.embedding\.model_path.*{names}"):
        OnnxEncoder(tmp_path)


def test_a_model_with_another_output_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    (tmp_path / "model.onnx").write_bytes(onnx_lookup(np.zeros((4, 2), np.float32), output_shape=["batch", "length"]))
    with pytest.raises(ContractError, match="dimension"):
        OnnxEncoder(tmp_path)
