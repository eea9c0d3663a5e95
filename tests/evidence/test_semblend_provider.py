"""The real SemBlend pipeline behind our protocol; only its embedder is ours (its own loads torch and a model)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.config.evidence import SemBlendConfig
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.evidence.donor import Epoch
from dynamo_semkv.evidence.encoder import TokenizerFile
from dynamo_semkv.evidence.semblend import SemBlendProvider, verified_runs
from tests.bus.waiting import wait_for
from tests.evidence.documents import namespace, query_of
from tests.evidence.donors import donor
from tests.evidence.tiny_models import WORDS, write_tokenizer

A, B = namespace("a"), namespace("b")


class BagOfWords:
    """384 dimensions, as SemBlend's own."""

    dimension = 384

    def embed(self, text: str) -> Any:
        vector = np.zeros(self.dimension, np.float32)
        for word in text.split():
            vector[zlib.crc32(word.encode()) % self.dimension] += 1.0
        return vector / max(1e-9, float(np.linalg.norm(vector)))


def words(seed: int, tokens: int = 1_024) -> TokenArray:
    rng = np.random.default_rng(seed)
    own = rng.choice(np.arange(1, WORDS), 200, replace=False)
    return rng.choice(own, tokens).astype(np.uint32)


def asked(tokens: TokenArray) -> TokenArray:
    """The document with another last block: SemBlend does not return a donor that is equal."""
    return np.concatenate((tokens[:-64], words(4_242, 64)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(tokenizer: Path) -> Iterator[Callable[..., SemBlendProvider]]:
    made: list[SemBlendProvider] = []

    def build(embedder: Any = None, **fields: Any) -> SemBlendProvider:
        made.append(SemBlendProvider(SemBlendConfig(**fields), embedder or BagOfWords(), TokenizerFile(tokenizer)))
        return made[-1]

    yield build
    for provider in made:
        provider.close()


def settled(provider: SemBlendProvider) -> bool:
    counts = provider.counts
    done = counts["registered"] + counts["stale"] + counts["failed"] + counts["refused"]
    return counts["queued"] <= done and provider.snapshot()["queued"] == 0


def learn(
    provider: SemBlendProvider, name: str, tokens: TokenArray, where: CacheNamespace = A, epoch: Epoch | None = None
) -> None:
    provider.prompt_routed(query_of(tokens, where))
    provider.donor_added(donor(name, tokens, where, **({"epoch": epoch} if epoch else {})))
    wait_for("registered", lambda: settled(provider))


def found(provider: SemBlendProvider, tokens: TokenArray, where: CacheNamespace = A) -> list[str]:
    return [match.donor_id for match in provider.lookup(query_of(tokens, where))]


def test_it_finds_the_donor_and_claims_what_is_equal(make: Callable[..., SemBlendProvider]) -> None:
    provider = make()
    for n in range(4):
        learn(provider, f"d{n}", words(n))
    prompt = asked(words(2))
    (match,) = provider.lookup(query_of(prompt, A))
    assert (match.donor_id, match.provider) == ("d2", "semblend")
    for segment in match.segments:
        here = prompt[segment.target_start : segment.target_start + segment.token_count]
        there = words(2)[segment.donor_start : segment.donor_start + segment.token_count]
        assert np.array_equal(here, there)
    assert match.reusable_token_count >= 0.8 * len(prompt)
    assert found(provider, words(50)) == []


def test_one_tenants_text_is_never_found_by_another(make: Callable[..., SemBlendProvider]) -> None:
    """Its store strips blanks from salts and shows keyed donors to unkeyed lookups: neither can happen with a digest as
    the key."""
    provider, blank = make(), namespace(" a ")
    learn(provider, "a", words(1))
    for where in (B, blank, namespace("")):
        assert found(provider, asked(words(1)), where) == []
    assert found(provider, asked(words(1)), namespace(None)) == []
    learn(provider, "b", words(1), B)
    assert found(provider, asked(words(1)), A) == ["a"]
    assert found(provider, asked(words(1)), B) == ["b"]


def test_a_donor_that_is_gone_is_not_returned_and_its_place_is_taken_back(
    make: Callable[..., SemBlendProvider],
) -> None:
    provider, epoch = make(), Epoch("g1")
    for n in range(17):
        learn(provider, f"d{n}", words(n), epoch=epoch)
    learn(provider, "other epoch", words(80))
    provider.donor_removed("d3")
    assert found(provider, asked(words(3))) == []
    assert provider.counts["gone"] == 1
    epoch.end()
    assert found(provider, asked(words(4))) == []
    learn(provider, "last", words(81))
    wait_for("filled anew", lambda: provider.counts["refilled"] == 1)
    assert provider.snapshot()["in_store"] == 2
    assert found(provider, asked(words(80))) == ["other epoch"]


def test_an_id_that_comes_again_has_its_new_tokens(make: Callable[..., SemBlendProvider]) -> None:
    provider = make()
    learn(provider, "d", words(1))
    learn(provider, "d", words(2))
    assert found(provider, asked(words(2))) == ["d"]
    assert found(provider, asked(words(1))) == []


@pytest.mark.parametrize("bad", [np.zeros(7), np.full(384, np.nan), np.full((2, 384), 1.0)])
def test_an_embedding_that_would_break_lookups_is_refused(make: Callable[..., SemBlendProvider], bad: Any) -> None:
    class Sometimes(BagOfWords):
        def embed(self, text: str) -> Any:
            return bad if self.spoilt else super().embed(text)

        spoilt = False

    embedder = Sometimes()
    provider = make(embedder)
    learn(provider, "good", words(1))
    embedder.spoilt = True
    learn(provider, "bad", words(2))
    assert provider.counts["failed"] == 1
    embedder.spoilt = False
    assert found(provider, asked(words(1))) == ["good"]


def test_the_store_never_gets_full(make: Callable[..., SemBlendProvider]) -> None:
    provider = make(max_donors=4)
    for n in range(40):
        learn(provider, f"d{n}", words(n, 256))
        assert provider.snapshot()["in_store"] <= 2 * 4 + 32
    assert provider.counts["refilled"] >= 1
    assert len(provider) == 4
    assert found(provider, np.concatenate((words(39, 256)[:-32], words(7, 32)))) == ["d39"]


def test_pairs_that_are_not_equal_are_no_claim() -> None:
    prompt, other = words(1, 200), words(2, 200)
    there = np.arange(200)
    assert verified_runs(prompt, other, there, there) == ()
    assert verified_runs(prompt, prompt, there + 190, there + 190) == ()
    mixed = np.concatenate((prompt[:100], other[100:]))
    (run,) = verified_runs(prompt, mixed, there, there)
    assert (run.target_start, run.donor_start, run.token_count) == (0, 0, 100)
    assert verified_runs(prompt, prompt, [1, 2], [1]) == ()
