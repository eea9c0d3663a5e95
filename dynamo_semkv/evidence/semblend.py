"""SemBlendProvider: the real `semblend` package (0.3.25) behind our protocol. Optional (`evidence.semblend.enabled`,
extra `semblend`).

What would cause a wrong answer or a stall is handled here:

* its store has no removal: donors that are gone are dropped from its answers, and once they are as many as the others,
  a new store is filled beside the old one and then takes its place;
* a full store takes seconds for each add: it is made twice as large as the donors we give it, and ours go first;
* an id that is registered again keeps its old tokens: every registration gets an id of its own;
* a lookup without an isolation key sees all tenants: the key, the namespace digest, is always given, and compared with
  the donor's own once more;
* what it maps is compared token by token: segments and `reusable_token_count` are the equal tokens, not its claim;
* an embedder of another dimension makes lookups raise and a NaN is taken: both are refused when the donor is
  registered.

It takes hundreds of milliseconds for a long prompt, which no deadline can shorten: such lookups are timeouts, the
breaker puts the provider aside, and one lookup at a time occupies its own thread only. A donor whose tokens equal the
prompt's is not returned by SemBlend; that is exact reuse, and Dynamo and the fingerprints know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynamo_semkv.config.evidence import SemBlendConfig
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch, SemanticTrtSegment
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.encoder import Detokenizer
from dynamo_semkv.evidence.learner import DonorLearner
from dynamo_semkv.evidence.provider import LookupQuery

MIN_TOKENS = 100
"""SemBlend's own integrations ask for no less."""
MIN_RUN = 16
MAX_SEGMENTS = 32
MAX_QUEUED = 256
_REFILL_FROM = 16


class Embedder(Protocol):
    """SemBlend's own protocol, as far as its pipeline uses it."""

    @property
    def dimension(self) -> int:
        """Length of every vector."""
        ...

    def embed(self, text: str) -> Any:
        """One vector of shape [dimension], or None for a text that cannot be embedded."""
        ...


def minilm(model_path: str) -> Embedder:
    """SemBlend's CPU embedder, reading a local directory instead of the hub. ImportError without
    sentence-transformers."""
    import sentence_transformers  # noqa: F401  SemBlend would only log that it is missing, and then find nothing
    from semblend_core.embedder import MiniLMEmbedder

    class LocalMiniLM(MiniLMEmbedder):  # type: ignore[misc]
        MODEL_NAME = model_path

    embedder: Embedder = LocalMiniLM()
    return embedder


@dataclass(frozen=True)
class _Registered:
    donor: CatalogDonor
    tokens: TokenArray


class SemBlendProvider(DonorLearner):
    """Donors are registered with SemBlend in the learner's thread, lookups come from the provider's."""

    name = "semblend"

    def __init__(
        self,
        config: SemBlendConfig,
        embedder: Embedder,
        detokenizer: Detokenizer,
        make_pipeline: Callable[[SemBlendConfig, Embedder], Any] | None = None,
    ) -> None:
        super().__init__(config.max_prompt_bytes, config.max_donors, MAX_QUEUED)
        self._config = config
        self._embedder = embedder
        self._detokenizer = detokenizer
        self._make = make_pipeline if make_pipeline is not None else new_pipeline
        self._pipeline = self._make(config, embedder)
        self._known: dict[str, _Registered] = {}
        """Everything in SemBlend's store, by SemBlend's id, donors that are gone included."""
        self._serial = 0
        # Counts: `lookups`, `tenant_unknown`, `no_text`, `misses`, `gone`, `foreign`, `unverified`, `matches`;
        # `queued`, `queue_full`, `registered`, `stale`, `refused`, `failed`, `refilled`, `crowded_out`.
        self._start_thread()

    def __len__(self) -> int:
        return len(self._wanted)

    def lookup(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """SemBlend's one answer, as far as the donor's tokens confirm it; otherwise nothing, with the reason
        counted."""
        self.counts["lookups"] += 1
        if query.namespace.tenant is None:
            self.counts["tenant_unknown"] += 1
            return ()
        text = self._detokenizer.text(query.tokens)
        if len(query.tokens) < MIN_TOKENS or not text.strip():
            self.counts["no_text"] += 1
            return ()
        with self._lock:
            pipeline, known = self._pipeline, self._known
        result = pipeline.find_donor(query.tokens.tolist(), text, extra_key=query.digest.hex())
        if not result.found:
            self.counts["misses"] += 1
            return ()
        registered = known.get(result.donor_id or "")
        donor = self._alive(registered)
        if registered is None or donor is None:
            self.counts["gone"] += 1
            return ()
        if donor.namespace_digest_hex != query.digest.hex():
            self.counts["foreign"] += 1
            return ()
        match = self._match(query, donor, registered.tokens, result)
        self.counts["unverified" if match is None else "matches"] += 1
        return () if match is None else (match,)

    def snapshot(self) -> dict[str, Any]:
        """Counters and sizes, JSON-able."""
        with self._lock:
            return {
                "donors": len(self._wanted),
                "in_store": len(self._known),
                **self._learner_state(),
            }

    def _match(
        self, query: LookupQuery, donor: CatalogDonor, tokens: TokenArray, result: Any
    ) -> SemanticTrtMatch | None:
        segments = verified_runs(
            query.tokens,
            tokens[: donor.token_count],
            result.position_map.target_positions,
            result.position_map.donor_positions,
        )
        reusable = sum(segment.token_count for segment in segments)
        if reusable == 0 or not donor.creditable:
            return None
        donor.used()
        proven = donor.sketch.proven_blocks(query.chain) if donor.sketch is not None else 0
        exact = min(proven * (query.namespace.tokens_per_block or 0), len(query.tokens), donor.token_count)
        exact = 0 if query.namespace.unknown_fields() else exact
        similarity = float(np.clip(result.similarity, 0.0, 1.0))
        return SemanticTrtMatch(
            donor_id=donor.donor_id,
            reusable_token_count=max(reusable, exact),
            exact_prefix_tokens=exact,
            match_type=MatchType.EXACT_EQUIVALENT if 2 * exact >= max(reusable, 1) else MatchType.SEMANTIC_CANDIDATE,
            location=donor.location,
            provider=self.name,
            provider_generation=donor.generation,
            segments=segments,
            overlap=max(reusable, exact) / len(query.tokens),
            confidence=similarity,
            edited=len(segments) > 1,
            quality_signals={"similarity": similarity, "runs": len(segments), "verified_tokens": reusable},
            metadata={"donor_tokens": donor.token_count},
        )

    def _alive(self, registered: _Registered | None) -> CatalogDonor | None:
        """The catalog's present donor, if it is still the one whose tokens SemBlend has."""
        if registered is None:
            return None
        donor = self._wanted.get(registered.donor.donor_id)
        same = donor is not None and donor.sketch is registered.donor.sketch and donor.epoch is registered.donor.epoch
        return donor if same and donor is not None and not donor.epoch.over else None

    def _index_donor(self, donor: CatalogDonor, tokens: TokenArray) -> None:
        job = _Registered(donor, tokens)
        if self._alive(job) is None:
            self.counts["stale"] += 1
            return
        done = self._register(self._pipeline, self._known, job)
        self.counts["registered" if done else "refused"] += 1
        self._refill_if_mostly_dead()

    def _register(self, pipeline: Any, known: dict[str, _Registered], job: _Registered) -> bool:
        """False: too short, or without text."""
        text = self._detokenizer.text(job.tokens)
        if len(job.tokens) < MIN_TOKENS or not text.strip():
            return False
        self._serial += 1
        own_id = f"{job.donor.donor_id}#{self._serial}"
        pipeline.register_donor(
            own_id, job.tokens.tolist(), text, extra_key=job.donor.namespace_digest_hex, cache_salt=None
        )
        with self._lock:
            known[own_id] = job
        return True

    def _refill_if_mostly_dead(self) -> None:
        living = [job for job in self._known.values() if self._alive(job) is not None]
        if len(self._known) - len(living) < max(_REFILL_FROM, len(living)):
            return
        pipeline, known = self._make(self._config, self._embedder), dict[str, _Registered]()
        for job in living:
            if self._alive(job) is not None:
                self._register(pipeline, known, job)
        with self._lock:
            self._pipeline, self._known = pipeline, known
        self.counts["refilled"] += 1


class _Checked:
    """An embedder that raises ValueError for a vector of another dimension or with a value that is not finite."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.dimension = embedder.dimension
        self.available = True

    def embed(self, text: str) -> npt.NDArray[np.float32] | None:
        raw = self._embedder.embed(text)
        if raw is None:
            return None
        vector = np.asarray(raw, np.float32)
        if vector.shape != (self.dimension,) or not np.isfinite(vector).all():
            raise ValueError(f"embedding: got shape {vector.shape}, allowed: ({self.dimension},) of finite numbers")
        return vector


def new_pipeline(config: SemBlendConfig, embedder: Embedder) -> Any:
    """SemBlend's pipeline with its stock gates. ImportError without the package."""
    from semblend_core.pipeline import SemBlendPipeline

    pipeline = SemBlendPipeline(
        max_donors=2 * config.max_donors + 2 * _REFILL_FROM,
        min_similarity=config.min_similarity,
        min_reuse_ratio=config.min_reuse_ratio,
        embedder_type="jaccard",  # for the constructor only: "minilm" would look for a GPU and for the hub
        enable_pq_segments=False,
    )
    pipeline._embedder = _Checked(embedder)
    pipeline._donor_store = _store(config, embedder.dimension, pipeline.chunk_size)
    return pipeline


def _store(config: SemBlendConfig, dimension: int, chunk_size: int) -> Any:
    from semblend_core.donor_store import DonorStore

    return DonorStore(
        max_entries=2 * config.max_donors + 2 * _REFILL_FROM,
        embedding_dim=dimension,
        min_similarity=config.min_similarity,
        chunk_size=chunk_size,
    )


def verified_runs(
    prompt: TokenArray, donor: TokenArray, target_positions: Sequence[int], donor_positions: Sequence[int]
) -> tuple[SemanticTrtSegment, ...]:
    """The pairs of positions whose tokens are equal, as runs of at least MIN_RUN tokens that do not overlap in the
    prompt; at most MAX_SEGMENTS, the longest ones."""
    target, other = np.asarray(target_positions, np.int64), np.asarray(donor_positions, np.int64)
    if len(target) != len(other) or len(target) == 0:
        return ()
    inside = (target >= 0) & (target < len(prompt)) & (other >= 0) & (other < len(donor))
    target, other = target[inside], other[inside]
    same = prompt[target] == donor[other]
    target, other = target[same], other[same]
    _, first = np.unique(target, return_index=True)
    target, other = target[first], other[first]
    if len(target) == 0:
        return ()
    breaks = np.flatnonzero((np.diff(target) != 1) | (np.diff(other) != 1)) + 1
    runs = [run for run in np.split(np.arange(len(target)), breaks) if len(run) >= MIN_RUN]
    kept = sorted(sorted(runs, key=len, reverse=True)[:MAX_SEGMENTS], key=lambda run: int(run[0]))
    return tuple(
        SemanticTrtSegment(target_start=int(target[run[0]]), donor_start=int(other[run[0]]), token_count=len(run))
        for run in kept
    )
