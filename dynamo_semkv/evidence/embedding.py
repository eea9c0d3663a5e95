"""EmbeddingProvider: finds donors with the same meaning in other words, which fingerprints cannot find. Optional
(`evidence.embedding.enabled`).

    routed prompt + donor event -> windows -> vectors (a thread of its own) -> index of the partition
    lookup: a few windows of the prompt, as many as `budget_ms` pays for -> nearest windows
            -> donors that most of them point to

* Donors are embedded after their event came, never on the event loop and never in a lookup; a registration whose epoch
  ended meanwhile is dropped. Which text a donor has says `routed.py`, and only for prompts that this router routed
  itself.
* A claim is about meaning: no segment, no proven prefix, always a `semantic_candidate`. `reusable_token_count` is the
  share of the windows asked about that the donor has something alike for, times the prompt's length. No token of it is
  known to be equal.
* Donors of one subject area are all somewhat alike. A match must be alike (`min_similarity`) and more so than the
  others by `min_lead`; of two texts that are equally alike neither is a match. With too few windows or donors to
  compare, it must be much alike (`min_similarity_alone`). A window to which a quarter of the donors are alike, as a
  shared template, is left out.
* Windows lie on one grid and their vectors are kept, by tenant, so prompts that begin alike share the cost.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamo_semkv.config.evidence import EmbeddingConfig
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.encoder import Detokenizer, Encoder, Vectors
from dynamo_semkv.evidence.learner import DonorLearner
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.evidence.vectors import Near, VectorIndex

NEIGHBOURS = 32
MAX_MATCHES = 4
MAX_QUEUED = 1_024
CONVINCING = 4
"""Windows that agree; more of them add no confidence."""
MIN_OTHERS = 8
"""Donors beside the one in question without which nobody can stand out."""
MAX_REMEMBERED = 4_096
"""Windows."""
_AT_ONCE = 4
"""Windows encoded and added in one step: how long a lookup may have to wait for the index."""
_AS_GOOD = 0.02
_CLEARLY = 0.03
_SAME = 0.5
_COMMON = 0.25
_FORGETTING = 0.98
"""Factor for each lookup: a measured time that leaves no room for even one window is measured again after a while."""
_FEW = 4


@dataclass
class _Indexed:
    donor: CatalogDonor
    row: int
    windows: int = 0


@dataclass
class _Partition:
    index: VectorIndex
    donors: dict[int, _Indexed] = field(default_factory=dict)


class EmbeddingProvider(DonorLearner):
    """Lookups come from the provider's thread."""

    name = "embedding"

    def __init__(
        self,
        config: EmbeddingConfig,
        encoder: Encoder,
        detokenizer: Detokenizer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(config.max_prompt_bytes, config.max_donors, MAX_QUEUED)
        self._config = config
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._clock = clock
        self._indexed: dict[str, _Indexed] = {}
        self._partitions: dict[str, _Partition] = {}
        self._next_row = 0
        self._window_seconds: float | None = None
        """Measured seconds for one window of a query; None before the first."""
        self._remembered: OrderedDict[bytes, Vectors] = OrderedDict()
        self._memory = threading.Lock()
        # Counts: `remembered` windows, which cost nothing, `lookups`, `tenant_unknown`, `no_partition`, `no_time`,
        # `no_text`, `unlike`, `matches`; `queued`, `queue_full`, `indexed`, `stale`, `failed`, `removed`,
        # `crowded_out`.
        self._start_thread()

    def __len__(self) -> int:
        return len(self._indexed)

    def lookup(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """At most MAX_MATCHES matches, best first. Reads as many new windows as `budget_ms` pays for."""
        began = self._clock()
        self.counts["lookups"] += 1
        if query.namespace.tenant is None:
            self.counts["tenant_unknown"] += 1
            return ()
        digest = query.digest.hex()
        if digest not in self._partitions:
            self.counts["no_partition"] += 1
            return ()
        starts = _centred(len(query.tokens), self._config.window_tokens, self._config.query_windows)
        new = [start for start in starts if self._remembered_vector(query.digest, query.tokens, start) is None]
        count = min(len(new), self._windows_in_budget())
        read = sorted({*starts} - {*new} | {*_some(new, count)})
        if not read:
            self.counts["no_time"] += 1
            return ()
        vectors = self._vectors(query.digest, query.tokens, read)
        if count:
            self._record_cost((self._clock() - began) / count)
        vectors = vectors[np.any(vectors != 0, axis=1)]
        if len(vectors) == 0:
            self.counts["no_text"] += 1
            return ()
        with self._lock:
            partition = self._partitions.get(digest)
            if partition is None:
                return ()
            scores = _scores(partition.index.near(vectors, NEIGHBOURS), len(partition.donors))
            donors = {row: partition.donors[row].donor for row in scores if row in partition.donors}
        means = {row: float(np.mean(similar)) for row, similar in scores.items()}
        background = float(np.median(list(means.values()))) if len(means) > MIN_OTHERS else None
        matches = []
        for row, donor in donors.items():
            found = self._match(query, donor, scores[row], background)
            if found is not None and self._is_unrivalled(row, means, donors):
                donor.used()
                matches.append(found)
        if not matches:
            self.counts["unlike"] += 1
        self.counts["matches"] += len(matches)
        return sorted(matches, key=lambda match: (-match.confidence, match.donor_id))[:MAX_MATCHES]

    def snapshot(self) -> dict[str, Any]:
        """Counters and sizes, JSON-able."""
        with self._lock:
            return {
                "donors": len(self._indexed),
                "partitions": len(self._partitions),
                "vector_bytes": sum(partition.index.nbytes for partition in self._partitions.values()),
                "window_ms": None if self._window_seconds is None else round(1_000 * self._window_seconds, 3),
                **self._learner_state(),
            }

    def _match(
        self, query: LookupQuery, donor: CatalogDonor, similar: Sequence[float], background: float | None
    ) -> SemanticTrtMatch | None:
        """`background`: how alike the donors are that the prompt's windows are nearest to; None where there are too
        few."""
        mean = float(np.mean(similar))
        if background is not None and mean < background + self._config.min_lead:
            return None
        alone, together = self._config.min_similarity_alone, self._config.min_similarity
        sure = 0.0 if background is None else min(1.0, (len(similar) - 1) / (CONVINCING - 1))
        enough = alone + (together - alone) * sure
        alike = sum(value >= self._config.min_similarity for value in similar) / len(similar)
        reusable = min(len(query.tokens), donor.token_count, round(alike * len(query.tokens)))
        if mean < enough or reusable == 0 or not donor.creditable:
            return None
        return SemanticTrtMatch(
            donor_id=donor.donor_id,
            reusable_token_count=reusable,
            match_type=MatchType.SEMANTIC_CANDIDATE,
            location=donor.location,
            provider=self.name,
            provider_generation=donor.generation,
            overlap=reusable / len(query.tokens),
            confidence=min(1.0, mean) * min(1.0, len(similar) / CONVINCING),
            quality_signals={
                "similarity": round(mean, 4),
                "windows": len(similar),
                "windows_alike": round(alike * len(similar)),
                **({} if background is None else {"background": round(background, 4)}),
            },
            metadata={"donor_tokens": donor.token_count},
        )

    def _is_unrivalled(self, row: int, means: dict[int, float], donors: dict[int, CatalogDonor]) -> bool:
        """Whether the donor is much alike, or clearly more so than every donor of another text."""
        if means[row] >= self._config.min_similarity_alone:
            return True
        rivals = [other for other in donors if other != row and means[other] > means[row] - _CLEARLY]
        return all(_one_text(donors[row], donors[other]) for other in rivals)

    def _windows_in_budget(self) -> int:
        if self._window_seconds is None:
            return 1
        self._window_seconds *= _FORGETTING
        return min(self._config.query_windows, int(self._config.budget_ms / 1_000 / max(self._window_seconds, 1e-6)))

    def _record_cost(self, seconds: float) -> None:
        """Takes the measured time for one window. A longer one counts at once, a shorter one by a tenth: a late lookup
        costs more than one window less does."""
        known = self._window_seconds
        self._window_seconds = seconds if known is None or seconds > known else 0.9 * known + 0.1 * seconds

    def _key(self, digest: bytes, tokens: TokenArray, start: int) -> bytes:
        """The key of a window's vector. The namespace's digest is part of it, so that the time of a lookup does not
        reveal what another tenant wrote."""
        return digest + tokens[start : start + self._config.window_tokens].tobytes()

    def _remembered_vector(self, digest: bytes, tokens: TokenArray, start: int) -> Vectors | None:
        with self._memory:
            return self._remembered.get(self._key(digest, tokens, start))

    def _vectors(self, digest: bytes, tokens: TokenArray, starts: Sequence[int]) -> Vectors:
        """The windows' vectors, shape [len(starts), dimension]. Those that are not kept are encoded now."""
        window = self._config.window_tokens
        found = {start: self._remembered_vector(digest, tokens, start) for start in starts}
        new = [start for start, vector in found.items() if vector is None]
        self.counts["remembered"] += len(starts) - len(new)
        if new:
            read = self._encoder.encode([self._detokenizer.text(tokens[at : at + window]) for at in new], window)
            with self._memory:
                for start, vector in zip(new, read, strict=True):
                    found[start] = self._remembered[self._key(digest, tokens, start)] = vector
                while len(self._remembered) > MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
        return np.stack([vector for vector in found.values() if vector is not None])

    def _refresh(self, donor: CatalogDonor) -> None:
        if donor.donor_id in self._indexed:
            self._indexed[donor.donor_id].donor = donor

    def _forget(self, donor_id: str) -> None:
        known = self._indexed.pop(donor_id, None)
        if known is None:
            return
        digest = known.donor.namespace_digest_hex
        partition = self._partitions[digest]
        del partition.donors[known.row]
        if not partition.donors:
            del self._partitions[digest]
        else:
            partition.index.remove(known.row, range(known.windows))
        self.counts["removed"] += 1

    def _index_donor(self, donor: CatalogDonor, tokens: TokenArray) -> None:
        starts = _spread(min(len(tokens), donor.token_count), self._config.window_tokens, self._config.max_windows)
        donor_digest = bytes.fromhex(donor.namespace_digest_hex)
        for first in range(0, len(starts), _AT_ONCE):
            if not self._is_wanted(donor):
                self.counts["stale"] += 1
                return
            began = self._clock()
            vectors = self._vectors(donor_digest, tokens, starts[first : first + _AT_ONCE])
            if self._window_seconds is None:
                self._record_cost((self._clock() - began) / len(vectors))
            with self._lock:
                if self._is_wanted(donor):
                    self._add_vectors(donor, vectors)
        self.counts["indexed"] += 1

    def _is_wanted(self, donor: CatalogDonor) -> bool:
        """Whether the donor is still in the catalog, in the epoch it was registered in."""
        wanted = self._wanted.get(donor.donor_id)
        return wanted is not None and wanted.sketch is donor.sketch and not donor.epoch.over

    def _add_vectors(self, donor: CatalogDonor, vectors: Vectors) -> None:
        known = self._indexed.get(donor.donor_id)
        if known is None:
            known = self._indexed[donor.donor_id] = _Indexed(self._wanted[donor.donor_id], self._next_row)
            self._next_row += 1
        partition = self._partitions.get(donor.namespace_digest_hex)
        if partition is None:
            partition = _Partition(VectorIndex(self._encoder.dimension))
            self._partitions[donor.namespace_digest_hex] = partition
        partition.donors[known.row] = known
        partition.index.add(known.row, known.windows, vectors)
        known.windows += len(vectors)


def _one_text(one: CatalogDonor, other: CatalogDonor) -> bool:
    """Whether both are one prompt on two replicas, or a prompt and its next turn: they share most samples of the
    shorter one."""
    if one.sketch is None or other.sketch is None or one.sketch.spacing != other.sketch.spacing:
        return False
    fewer, more = sorted((one.sketch.fingerprints, other.sketch.fingerprints), key=len)
    return bool(np.isin(fewer, more).mean() >= _SAME) if len(fewer) else False


def _spread(tokens: int, window: int, most: int) -> list[int]:
    """Starts of windows one behind the other, from the first token; evenly chosen where there would be more than
    `most`."""
    starts = np.arange(0, max(1, tokens - window // 2), window)
    if len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    found: list[int] = starts.tolist()
    return found


def _centred(tokens: int, window: int, count: int) -> list[int]:
    """Starts of at most `count` windows, each near the middle of its part of the prompt and on the grid of
    `_spread`."""
    count = min(count, max(1, tokens // window))
    return sorted({max(0, round((n + 0.5) * tokens / count / window - 0.5)) * window for n in range(count)})


def _some(starts: Sequence[int], count: int) -> list[int]:
    """`count` of them, evenly chosen, from the middle where it is one."""
    return [starts[int((n + 0.5) * len(starts) / count)] for n in range(count)]


def _scores(near: Near, donors: int) -> dict[int, list[float]]:
    """By donor row: how alike its best window is to each of the prompt's, those left out that too many donors are alike
    to."""
    best: list[dict[int, float]] = []
    for rows, similarity in zip(near.rows.tolist(), near.similarity.tolist(), strict=True):
        by_row: dict[int, float] = {}
        for row, value in zip(rows, similarity, strict=True):
            if row >= 0:
                by_row[row] = max(value, by_row.get(row, -1.0))
        if not by_row:
            continue
        top = max(by_row.values())
        as_good = sum(value >= top - _AS_GOOD for value in by_row.values())
        if as_good <= max(_FEW, _COMMON * min(donors, NEIGHBOURS)):
            best.append(by_row)
    named = {row for by_row in best for row in by_row}
    # Not among the nearest: no more alike than the last of them.
    return {row: [by_row.get(row, max(0.0, min(by_row.values()))) for by_row in best] for row in named}
