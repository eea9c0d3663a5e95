"""The methods that we compare ourselves with, each behind the same two methods: `add` a donor, `find` the best one.

    fingerprint    ours                                     embedding    ours, without the budget: what it can find
    budgeted       the same with its default budget, as many windows a lookup as that pays for on this machine
    default        the same within the deadline of the defaults, which leaves it less; a later answer counts as none
    semblend       SemBlend 0.3.25 with its stock gates
    minilm         all-MiniLM-L6-v2, a text's windows pooled, brute force
    minhash        datasketch, 128 values over token 5-grams, brute force
    dynamo         Dynamo's exact index (RadixTree of 1.6.1), blocks of 32 tokens

A method that gives scores without a decision of its own gets a threshold, set by the report so that it accepts at most
1 % of the negatives.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dynamo_semkv.config.evidence import EmbeddingConfig, EvidenceConfig, FingerprintConfig, SemBlendConfig
from dynamo_semkv.contracts.keys import TokenArray, block_keys
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch
from dynamo_semkv.evidence.donor import CatalogDonor, Epoch, StreamKey
from dynamo_semkv.evidence.embedding import EmbeddingProvider
from dynamo_semkv.evidence.encoder import OnnxEncoder
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.evidence.semblend import SemBlendProvider, minilm

BLOCK = 32
GRAM = 5
PERMUTATIONS = 128
WINDOW = 128


class Found(NamedTuple):
    """A method's best donor for one prompt."""

    donor_id: str
    score: float
    """Higher is surer; in [0, 1] for every method, but not comparable between methods."""
    tokens: int | None
    """The method's estimate of the common tokens; None where it makes none."""
    decided: bool
    """Whether the method itself decides that this is a match. False: it always names a donor, and a threshold must
    decide."""


class Peer(Protocol):
    """One method under comparison. One thread."""

    name: str

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        """Makes the donor findable before it returns."""
        ...

    def find(self, tokens: TokenArray) -> Found | None:
        """The best donor; None where the method names none."""
        ...

    def close(self) -> None:
        """Ends threads and frees what the method holds."""
        ...


DEFAULT_MS = EvidenceConfig().deadline_ms


class Texts(Protocol):
    """Turns tokens of the workload into text."""

    def text(self, tokens: TokenArray) -> str:
        """The tokens' words, with blanks between."""
        ...


class Provided:
    """One of our providers, fed as a router feeds it: prompts first, then donor events."""

    def __init__(
        self, provider: Any, where: CacheNamespace, name: str | None = None, deadline: float = math.inf
    ) -> None:
        self.name: str = name or provider.name
        self._deadline = deadline
        """Seconds after which an answer counts as none, as in a router."""
        self.provider = provider
        self._where, self._digest, self._epoch = where, where.digest(), Epoch("g1")

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        """Feeds prompt and donor, and waits for background work."""
        query = self.query(tokens)
        if hasattr(self.provider, "prompt_routed"):
            self.provider.prompt_routed(query)
        self.provider.donor_added(
            CatalogDonor(
                donor_id=donor_id,
                namespace_digest_hex=self._digest.hex(),
                location=WorkerLocation(1, 0, Tier.HOST_PINNED),
                token_count=len(tokens),
                sketch=DonorSketch.of(tokens, self._digest, query.chain),
                stream=StreamKey(1, 0),
                epoch=self._epoch,
                tokens_per_block=BLOCK,
            )
        )
        self.settle()

    def settle(self) -> None:
        """Waits until the provider's background work is done."""
        counts = self.provider.counts
        while counts["queued"] > sum(counts[done] for done in ("indexed", "registered", "stale", "failed", "refused")):
            time.sleep(0.001)

    def find(self, tokens: TokenArray) -> Found | None:
        """The provider's first match, unless it came after the deadline."""
        query, began = self.query(tokens), time.perf_counter()
        matches = self.provider.lookup(query)
        if not matches or time.perf_counter() - began > self._deadline:
            return None
        best = matches[0]
        return Found(best.donor_id, best.confidence, best.reusable_token_count, True)

    def query(self, tokens: TokenArray) -> LookupQuery:
        """The lookup as a router would make it."""
        return LookupQuery(tokens, self._where, self._digest, block_keys(self._digest, tokens, BLOCK))

    def close(self) -> None:
        """Closes a provider that has threads; waits up to 5 seconds."""
        if hasattr(self.provider, "close"):
            self.provider.close(5.0)


class MiniLM:
    """Represents a text by the mean of its windows' vectors; the best donor is the one with the greatest cosine
    similarity."""

    name = "minilm"

    def __init__(self, encoder: OnnxEncoder, texts: Texts) -> None:
        self._encoder, self._texts = encoder, texts
        self._ids: list[str] = []
        self._vectors = np.zeros((0, encoder.dimension), np.float32)

    def _vector(self, tokens: TokenArray) -> np.ndarray[Any, Any]:
        starts = range(0, max(1, len(tokens) - WINDOW // 2), WINDOW)
        windows = self._encoder.encode([self._texts.text(tokens[at : at + WINDOW]) for at in starts], WINDOW)
        mean: np.ndarray[Any, Any] = windows.mean(axis=0)
        return mean / max(1e-9, float(np.linalg.norm(mean)))

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        """Encodes the text."""
        self._ids.append(donor_id)
        self._vectors = np.vstack((self._vectors, self._vector(tokens)))

    def find(self, tokens: TokenArray) -> Found | None:
        """Compares with every donor; names one whenever there are any."""
        if not self._ids:
            return None
        alike = self._vectors @ self._vector(tokens)
        best = int(alike.argmax())
        return Found(self._ids[best], float(alike[best]), None, False)

    def close(self) -> None:
        """Nothing to end."""


class MinHash:
    """Compares token 5-grams; the estimate of the Jaccard index also gives one of the common tokens."""

    name = "minhash"

    def __init__(self) -> None:
        from datasketch import MinHash as Sketch

        self._sketch: Callable[[], Any] = lambda: Sketch(num_perm=PERMUTATIONS, seed=1)
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._values = np.zeros((64, PERMUTATIONS), np.uint64)

    def _of(self, tokens: TokenArray) -> np.ndarray[Any, Any]:
        raw = np.ascontiguousarray(tokens, "<u4").tobytes()
        sketch = self._sketch()
        sketch.update_batch([raw[at : at + 4 * GRAM] for at in range(0, len(raw) - 4 * GRAM + 1, 4)])
        values: np.ndarray[Any, Any] = sketch.hashvalues
        return values

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        """Hashes the 5-grams."""
        if len(self._ids) == len(self._values):
            self._values = np.vstack((self._values, np.zeros_like(self._values)))
        self._values[len(self._ids)] = self._of(tokens)
        self._ids.append(donor_id)
        self._lengths.append(len(tokens))

    def find(self, tokens: TokenArray) -> Found | None:
        """Compares with every donor; names one whenever there are any."""
        if not self._ids:
            return None
        equal = (self._values[: len(self._ids)] == self._of(tokens)).mean(axis=1)
        best = int(equal.argmax())
        jaccard = float(equal[best])
        common = round(jaccard / (1 + jaccard) * (len(tokens) + self._lengths[best]))
        return Found(self._ids[best], jaccard, common, False)

    def close(self) -> None:
        """Nothing to end."""


class DynamoExact:
    """Dynamo's own exact-prefix index; every donor is stored as a worker of its own."""

    name = "dynamo"

    def __init__(self) -> None:
        from dynamo.llm import RadixTree, compute_block_hash_for_seq

        self._tree, self._hashes = RadixTree(), compute_block_hash_for_seq
        self._ids: list[str] = []

    def add(self, donor_id: str, tokens: TokenArray) -> None:
        """Stores the prompt's full blocks."""
        blocks = [{"block_hash": h, "tokens_hash": h} for h in self._hashes(tokens.tolist(), BLOCK)]
        event = {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        self._tree.apply_event(len(self._ids), json.dumps(event).encode())
        self._ids.append(donor_id)

    def find(self, tokens: TokenArray) -> Found | None:
        """The donor with the longest common prefix; None without a common block."""
        scores: dict[Any, int] = self._tree.find_matches(self._hashes(tokens.tolist(), BLOCK)).scores
        if not scores:
            return None
        best, blocks = max(scores.items(), key=lambda item: (item[1], item[0]))
        # The keys are workers, or pairs of worker and rank, depending on the version.
        worker = best[0] if isinstance(best, tuple) else best
        return Found(self._ids[worker], blocks * BLOCK / len(tokens), blocks * BLOCK, True)

    def close(self) -> None:
        """Nothing to end."""


def peers(
    where: CacheNamespace, texts: Texts, model: Path | None, onnx: Path | None, names: Sequence[str]
) -> list[Peer]:
    """The methods named, ready to use. `model`: all-MiniLM-L6-v2 as sentence-transformers reads it, `onnx`: the same
    for `OnnxEncoder`. Raises ImportError for a method that is not installed (the extra `peers`)."""

    def embedding(name: str, config: EmbeddingConfig, deadline_ms: float = math.inf) -> Peer:
        return Provided(EmbeddingProvider(config, OnnxEncoder(onnx or ""), texts), where, name, deadline_ms / 1e3)

    make: dict[str, Callable[[], Peer]] = {
        "fingerprint": lambda: Provided(FingerprintProvider(FingerprintConfig()), where),
        "embedding": lambda: embedding("embedding", EmbeddingConfig(budget_ms=1_000.0)),
        "budgeted": lambda: embedding("budgeted", EmbeddingConfig()),
        "default": lambda: embedding("default", EmbeddingConfig(budget_ms=DEFAULT_MS * 0.9), DEFAULT_MS),
        "semblend": lambda: Provided(SemBlendProvider(SemBlendConfig(), minilm(str(model)), texts), where),
        "minilm": lambda: MiniLM(OnnxEncoder(onnx or ""), texts),
        "minhash": MinHash,
        "dynamo": DynamoExact,
    }
    return [make[name]() for name in names]
