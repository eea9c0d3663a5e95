"""FingerprintProvider: the default provider. Finds donors that share verbatim text with a prompt, and says where.

    sample the prompt -> its partition's postings -> candidates by rarity -> align -> decide -> matches

* Partitioned first: only the donors of the query's own namespace digest, and so of its tenant, are ever looked at. A
  request whose tenant is unknown has none.
* A sample weighs by its rarity among the partition's donors (inverse document frequency in [0, 1]), so what everybody
  shares, a system prompt or a tool schema, finds nobody. It still counts as verbatim tokens once other samples have
  found the donor.
* A donor is a match when its shared samples weigh `min_evidence` and stand for `min_overlap_share` of the prompt (a
  sample for 32 tokens, times its rarity), and one run is verbatim over `min_run_tokens`, or short ones in a row over
  three times as many; or when its proven prefix alone is `min_overlap_share` of the prompt, or ENOUGH_PROVEN tokens.
  Ranking alone would always name somebody.
* `exact_equivalent` means: the prefix whose block keys are proven equal makes up at least half of the tokens that the
  match claims, and every field of the namespace is known. Everything else is a `semantic_candidate`, whatever its
  proven prefix.

It knows no tokens of donors, only their sketches, and nothing about which replica is alive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.ma  # np.unique imports it at its first call, which would cost a lookup tens of milliseconds

from dynamo_semkv.config.evidence import FingerprintConfig
from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch, SemanticTrtSegment
from dynamo_semkv.contracts.sketch import (
    MAX_SAMPLES,
    SAMPLING,
    DonorSketch,
    SampledText,
    Samples,
    U32Array,
    sketch_key,
)
from dynamo_semkv.evidence.alignment import I64, Alignment, align
from dynamo_semkv.evidence.chains import Sharded, Slots
from dynamo_semkv.evidence.donor import CatalogDonor
from dynamo_semkv.evidence.partition import FloatArray, Partition, unposted_bits
from dynamo_semkv.evidence.postings import MAX_ROWS, ROW_BITS, Hits
from dynamo_semkv.evidence.provider import LookupQuery

MAX_CANDIDATES = 16
ENOUGH_PROVEN = 512
"""Tokens of a proven prefix that make a match in a prompt of any length: what they save does not depend on it."""
MAX_COMPARED = 4 * MAX_SAMPLES
"""Samples of the prompt: at the smallest spacing those of 131,072 tokens."""
MAX_SEGMENTS = 32
"""Per match, the longest ones: a dense edit would leave hundreds."""
MIN_SEGMENT_TOKENS = 16
IN_A_CHAIN = 3
"""Where changes leave no run of `min_run_tokens`, this many times as many tokens in short runs in a row count as
one."""
CONVINCING = 8.0
"""Weighted samples at which more of them add no confidence."""
_WORTH_A_LOOK = 0.1
"""Candidates with less than this share of the best one's weight are not aligned."""

_Candidate = tuple[CatalogDonor, DonorSketch, int]


class FingerprintProvider:
    """A DonorListener. Adds and removes come from the catalog's thread, lookups from the provider's; one lock, held
    while postings are read or written (tens of microseconds), never during alignment."""

    name = "fingerprint"

    def __init__(self, config: FingerprintConfig | None = None) -> None:
        self._config = config if config is not None else FingerprintConfig()
        self._lock = threading.Lock()
        self._partitions: dict[str, tuple[int, Partition]] = {}
        self._by_number: list[Partition | None] = []
        """The same partitions by number; a number is not used twice at a time."""
        self._numbers = Slots()
        self._places: Sharded[str, int] = Sharded()
        """Partition number and row of each donor, as one small integer."""
        self.counts: Counter[str] = Counter()
        """`indexed`, `removed`, `without_sketch`, `partition_full`, `lookups`, `no_partition`, `tenant_unknown`,
        `candidates`, `matches`; why candidates were rejected: `weak`, `short`, `small`, `stale`."""

    def __len__(self) -> int:
        return len(self._places)

    def donor_added(self, donor: CatalogDonor) -> None:
        """Indexes the donor's sketch; only its row changes if the same sketch is indexed already. A donor without
        samples, or beyond the room of its partition, is counted and left out."""
        sketch = donor.sketch
        with self._lock:
            known = self._place_of(donor.donor_id)
            if known is not None:
                at, partition, row = known
                before = partition.donor(row)
                same = before is not None and before.namespace_digest_hex == donor.namespace_digest_hex
                if same and before is not None and before.sketch is sketch:
                    partition.replace(row, donor)
                    return
                self._remove(donor.donor_id, at)
            if sketch is None or sketch.sample_count == 0:
                self.counts["without_sketch"] += 1
                return
            found = self._partitions.get(donor.namespace_digest_hex)
            if found is None:
                most = min(self._config.max_donors, self._config.max_donors_per_namespace)
                found = (self._numbers.take(), Partition(self._config.max_postings, most))
                self._partitions[donor.namespace_digest_hex] = found
                while len(self._by_number) <= found[0]:
                    self._by_number.append(None)
                self._by_number[found[0]] = found[1]
            number, partition = found
            if partition.full:
                self.counts["partition_full"] += 1
                return
            self._places[donor.donor_id] = number << ROW_BITS | partition.add(donor, sketch)
            self.counts["indexed"] += 1

    def donor_removed(self, donor_id: str) -> None:
        """Takes the donor out of every later search; nothing happens if it was not indexed."""
        with self._lock:
            known = self._place_of(donor_id)
            if known is not None:
                self._remove(donor_id, known[0])

    def lookup(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """Best first; at most MAX_CANDIDATES."""
        self.counts["lookups"] += 1
        if query.namespace.tenant is None:
            self.counts["tenant_unknown"] += 1
            return ()
        text = SampledText(query.tokens, sketch_key(query.digest))
        widest = text.windows(SAMPLING, MAX_COMPARED)
        with self._lock:
            numbered = self._partitions.get(query.digest.hex())
            if numbered is None:
                self.counts["no_partition"] += 1
                return ()
            partition = numbered[1]
            asked, places = partition.postable(widest.fingerprints[:MAX_SAMPLES])
            candidates, rarity = self._candidates(partition, asked, partition.find(asked))
        if not candidates or rarity is None:
            return ()
        self.counts["candidates"] += len(candidates)
        # The request's own block size: a donor's is what its emitter says.
        tokens_per_block = 0 if query.namespace.unknown_fields() else query.namespace.tokens_per_block or 0
        matches = []
        by_spacing: dict[int, list[_Candidate]] = {}
        for candidate in candidates:
            by_spacing.setdefault(candidate[1].spacing, []).append(candidate)
        for spacing, alike in by_spacing.items():
            # A donor is compared at its own spacing: the shorter it is, the finer.
            samples = text.linked(widest) if spacing == SAMPLING else text.samples(spacing, MAX_COMPARED)
            found = align(samples, len(query.tokens), [sketch for _, sketch, _ in alike])
            if places is not None and spacing == SAMPLING:
                weights = np.zeros(len(samples.fingerprints))
                weights[places] = rarity
            else:
                weights = _weights(samples.fingerprints, asked, rarity)
            # The weight of a sample in a donor that posts only one in 2**k.
            weights_by_thinning = {
                k: weights * (samples.fingerprints & unposted_bits(k) == 0)
                for k in {thinned for _, _, thinned in alike}
            }
            for (donor, sketch, thinned), alignment in zip(alike, found, strict=True):
                evidence = float(weights_by_thinning[thinned].take(alignment.shared).sum()) * (1 << thinned)
                match = self._match(query, donor, sketch, samples, alignment, evidence, tokens_per_block)
                if match is not None:
                    donor.used()
                    matches.append(match)
        self.counts["matches"] += len(matches)
        matches.sort(key=lambda m: (-m.reusable_token_count, -m.exact_prefix_tokens, m.donor_id))
        return matches

    def snapshot(self) -> dict[str, Any]:
        """Counters and sizes, JSON-able."""
        with self._lock:
            partitions = [partition for _, partition in self._partitions.values()]
            largest = max(map(len, partitions), default=0)
            postings = sum(partition.nbytes for partition in partitions)
            return {
                "donors": len(self._places),
                "partitions": len(self._partitions),
                "largest_partition": largest,
                "posting_bytes": postings,
                "counts": dict(self.counts),
            }

    def _place_of(self, donor_id: str) -> tuple[int, Partition, int] | None:
        """The donor's entry in `_places`, its partition and its row there; None if it is not indexed."""
        at = self._places.get(donor_id)
        partition = self._by_number[at >> ROW_BITS] if at is not None else None
        return (at, partition, at & MAX_ROWS - 1) if at is not None and partition is not None else None

    def _remove(self, donor_id: str, at: int) -> None:
        number = at >> ROW_BITS
        partition = self._by_number[number]
        del self._places[donor_id]
        self.counts["removed"] += 1
        if partition is None:
            return
        donor = partition.donor(at & MAX_ROWS - 1)
        partition.remove(at & MAX_ROWS - 1)
        if not len(partition) and donor is not None:
            del self._partitions[donor.namespace_digest_hex]
            self._by_number[number] = None
            self._numbers.give_back(number)

    def _candidates(
        self, partition: Partition, asked: U32Array, hits: Hits
    ) -> tuple[list[_Candidate], FloatArray | None]:
        """Donors by the rarity of what they share, at most MAX_CANDIDATES, and the rarity of each of `asked` where
        there are any."""
        least = self._config.min_shared_samples
        if len(hits.rows) < least:
            return [], None
        order = hits.rows.argsort(kind="stable")
        rows = hits.rows.take(order)
        changes = (rows[1:] != rows[:-1]).nonzero()[0]
        begins = np.zeros(len(changes) + 2, np.int64)
        np.add(changes, 1, out=begins[1:-1])
        begins[-1] = len(rows)
        shared = begins[1:] - begins[:-1]
        kept = (shared >= least).nonzero()[0]
        if len(kept) == 0:
            return [], None
        rarity = partition.rarity(asked, hits)
        rows = rows.take(begins.take(kept))
        thinned = partition.thinned(rows).astype(np.int64)
        weight = np.add.reduceat(rarity.take(hits.query.take(order)), begins[:-1]).take(kept)
        weight *= 1 << thinned
        found: list[_Candidate] = []
        floor = max(float(weight.max()) * _WORTH_A_LOOK, self._config.min_evidence / 4, 1e-9)
        # Ties go to the newer row often enough, and to the same one every time.
        for n in np.argsort(-weight, kind="stable")[: 4 * MAX_CANDIDATES].tolist():
            if weight[n] < floor or len(found) >= MAX_CANDIDATES:
                break
            donor = partition.donor(int(rows[n]))
            if donor is not None and donor.sketch is not None and donor.creditable:
                found.append((donor, donor.sketch, int(thinned[n])))
        return found, rarity

    def _match(
        self,
        query: LookupQuery,
        donor: CatalogDonor,
        sketch: DonorSketch,
        samples: Samples,
        alignment: Alignment,
        evidence: float,
        tokens_per_block: int,
    ) -> SemanticTrtMatch | None:
        """`samples`: the prompt's, at the donor's spacing."""
        prompt = len(query.tokens)
        proven = 0
        if tokens_per_block:
            proven = sketch.proven_blocks(query.chain, samples, tokens_per_block) * tokens_per_block
            proven = min(proven, prompt, donor.token_count)
        lead = _leading(alignment.places, proven) if proven else 0
        reusable = max(alignment.reusable_tokens, lead)
        objection = self._objection(donor, alignment, evidence, prompt, proven)
        if objection is not None:
            self.counts[objection] += 1
            return None
        return SemanticTrtMatch(
            donor_id=donor.donor_id,
            reusable_token_count=reusable,
            exact_prefix_tokens=proven,
            match_type=MatchType.EXACT_EQUIVALENT if 0 < reusable <= 2 * proven else MatchType.SEMANTIC_CANDIDATE,
            location=donor.location,
            provider=self.name,
            provider_generation=donor.generation,
            segments=_segments(alignment.places, lead),
            overlap=reusable / prompt,
            confidence=min(1.0, max(alignment.verified_tokens, lead) / reusable) * min(1.0, evidence / CONVINCING),
            edited=alignment.edited,
            quality_signals={
                "evidence": round(evidence, 3),
                "shared_samples": len(alignment.shared),
                "verified_tokens": max(alignment.verified_tokens, lead),
                "longest_run": alignment.longest_run,
            },
            metadata={"donor_tokens": donor.token_count, "sample_spacing": sketch.spacing},
        )

    def _objection(
        self, donor: CatalogDonor, alignment: Alignment, evidence: float, prompt: int, proven: int
    ) -> str | None:
        if 0 < proven >= min(ENOUGH_PROVEN, self._config.min_overlap_share * prompt):
            return None if donor.creditable else "stale"  # proof needs no evidence, however many have the same
        if evidence < self._config.min_evidence:
            return "weak"
        least = self._config.min_run_tokens
        if alignment.longest_run < least and alignment.longest_chain < IN_A_CHAIN * least:
            return "short"
        if evidence * SAMPLING < self._config.min_overlap_share * prompt:
            return "small"
        return None if donor.creditable else "stale"


def _weights(fingerprints: U32Array, known: U32Array, rarity: FloatArray) -> FloatArray:
    """Rarity of each of `fingerprints`, shape [n]: as it stands beside `known` (ascending, not empty), 0 for those that
    do not."""
    at = known.searchsorted(fingerprints)
    weights: FloatArray = rarity.take(at, mode="clip") * (known.take(at, mode="clip") == fingerprints)
    return weights


def _leading(places: I64, proven: int) -> int:
    """Tokens from the start of both that are the same: the proven prefix, and the runs that continue it. `places`: as
    in `Alignment`."""
    end = proven
    for target, donor, tokens in places.tolist():
        if target > end:
            break
        if target == donor:
            end = max(end, target + tokens)
    return end


def _segments(places: I64, lead: int) -> tuple[SemanticTrtSegment, ...]:
    """`places`: as in `Alignment`; of those the longest ones, by position in the prompt."""
    room = MAX_SEGMENTS - (lead > 0)
    if len(places) > room:
        places = _longest(places, lead, room)
    kept = [place for place in places.tolist() if not lead or place[0] != place[1] or place[0] >= lead]
    long_enough = [place for place in kept if place[2] >= MIN_SEGMENT_TOKENS] or kept
    return tuple(
        SemanticTrtSegment(target_start=target, donor_start=donor, token_count=tokens)
        for target, donor, tokens in ([[0, 0, lead], *long_enough] if lead else long_enough)
    )


def _longest(places: I64, lead: int, room: int) -> I64:
    """At most `room` of them, in order, none of the first `lead` tokens."""
    if lead:
        places = places[(places[:, 0] != places[:, 1]) | (places[:, 0] >= lead)]
    longest = np.argsort(-places[:, 2], kind="stable")[:room]
    longest.sort()
    return places[longest]
