"""`evidence`: which providers are asked for donors, for how long, and how each of them judges."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from dynamo_semkv.config.limits import check_limits
from dynamo_semkv.config.section import GIB, MIB, Count, FilePath, Section, Share
from dynamo_semkv.contracts.errors import ContractError


class FingerprintConfig(Section, frozen=True):
    """Evidence from sampled n-grams, the default provider."""

    PATH: ClassVar[str] = "evidence.fingerprint"

    enabled: bool = True
    max_donors: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    max_donors_per_namespace: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    min_shared_samples: Annotated[int, Meta(ge=1, le=1_000)] = 2
    """Shared sampled n-grams below which a donor is not looked at."""
    max_postings: Annotated[int, Meta(ge=4, le=64)] = 16
    """Donors kept under one n-gram, the newest; boilerplate that everybody shares says nothing about anybody."""
    min_evidence: Annotated[float, Meta(ge=0.0, le=1_000.0)] = 2.0
    """Shared samples that a donor must have, each weighted by its rarity in [0, 1]: a shared template alone is not
    enough."""
    min_run_tokens: Count = 24
    """Tokens that must be verbatim in one piece."""
    min_overlap_share: Share = 0.05
    """Share of the prompt that must be verbatim in the donor, what everybody has not counted."""


class EmbeddingConfig(Section, frozen=True):
    """Needs the extra `embeddings`. Knows donors that this router routed itself."""

    PATH: ClassVar[str] = "evidence.embedding"

    enabled: bool = False
    model_path: FilePath | None = None
    """Directory of the sentence encoder: `tokenizer.json` and `model.onnx` or `onnx/model.onnx`. Nothing is
    downloaded."""
    tokenizer_path: FilePath | None = None
    """`tokenizer.json` of the served model, or the directory it is in, to get text from token ids. null:
    `model.path`."""
    budget_ms: Annotated[float, Meta(ge=0.1, le=1_000.0)] = 30.0
    """What embedding a prompt may take; fewer windows are read where time is short. Less than `evidence.deadline_ms`,
    which therefore has to be raised: a window of 64 tokens takes all-MiniLM-L6-v2 with int8 weights about 7 ms of one
    core."""
    window_tokens: Annotated[int, Meta(ge=8, le=510)] = 64
    query_windows: Annotated[int, Meta(ge=1, le=64)] = 8
    """Windows of a prompt that are looked up, if the budget pays for them."""
    max_windows: Annotated[int, Meta(ge=1, le=1_024)] = 128
    """Windows of a donor that are kept, evenly spread; about half a kilobyte each."""
    max_donors: Annotated[int, Meta(ge=1, le=1_000_000)] = 2_000
    max_prompt_bytes: Annotated[int, Meta(ge=1024, le=64 * GIB)] = 64 * MIB
    """Tokens of routed prompts that are remembered until their donors are announced."""
    min_similarity: Share = 0.58
    """Mean cosine over four windows or more."""
    min_lead: Share = 0.11
    """By how much that mean must be above the median of the donors that the prompt is nearest to."""
    min_similarity_alone: Share = 0.72
    """The mean where only one window could be asked about (in between for two and three), or where fewer than nine
    donors are known."""


class SemBlendConfig(Section, frozen=True):
    """Needs the extra `semblend`. Knows donors that this router routed itself."""

    PATH: ClassVar[str] = "evidence.semblend"

    enabled: bool = False
    model_path: FilePath | None = None
    """Directory of all-MiniLM-L6-v2 as sentence-transformers wants it. Nothing is downloaded."""
    tokenizer_path: FilePath | None = None
    """As `evidence.embedding.tokenizer_path`."""
    max_donors: Annotated[int, Meta(ge=1, le=10_000)] = 1_000
    """SemBlend needs about 0.7 MB and, on a CPU, a fifth of a second a donor of 8k tokens."""
    max_prompt_bytes: Annotated[int, Meta(ge=1024, le=64 * GIB)] = 64 * MIB
    min_similarity: Share = 0.6
    min_reuse_ratio: Share = 0.5


class EvidenceConfig(Section, frozen=True):
    """Which providers are asked, and for how long."""

    PATH: ClassVar[str] = "evidence"

    deadline_ms: Annotated[float, Meta(ge=0.1, le=1_000.0)] = 5.0
    """Hard deadline over all providers together; later is a miss."""
    exact_deadline_ms: Annotated[float, Meta(ge=0.1, le=1_000.0)] = 10.0
    """Hard deadline for asking Dynamo for exact overlap and load."""
    skip_when_exact_covers: Share = 0.9
    """Share of the prompt that the best exact device overlap must cover for the lookup to be skipped."""
    max_inflight: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Requests weighed at the same time; what comes beyond goes to Dynamo's choice at once, with the reason
    `overloaded`."""
    max_matches: Annotated[int, Meta(ge=1, le=256)] = 8
    min_overlap_tokens: Count = 64
    """Matches with fewer reusable tokens are not evidence."""
    max_donor_age: Annotated[float, Meta(ge=60.0, le=30 * 86_400.0)] = 3 * 3_600.0
    """Seconds for which a donor is believed since its replica last said it; connectors say all of theirs again three
    times in that span. The same on routers and engines."""
    fingerprint: FingerprintConfig = FingerprintConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    semblend: SemBlendConfig = SemBlendConfig()

    def __post_init__(self) -> None:
        check_limits(self.PATH, self)
        for name, section in (("embedding", self.embedding), ("semblend", self.semblend)):
            if section.enabled and section.model_path is None:
                raise ContractError(
                    f"evidence.{name}.model_path", None, f"a directory, as evidence.{name}.enabled is true"
                )
        if self.embedding.enabled and self.embedding.budget_ms >= self.deadline_ms:
            raise ContractError(
                "evidence.embedding.budget_ms",
                self.embedding.budget_ms,
                f"less than evidence.deadline_ms, {self.deadline_ms:g} (40 there pays for four windows a lookup)",
            )
