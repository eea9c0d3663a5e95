"""Two tenants with the same text never see each other, whichever provider is asked and whatever came before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_semkv.config.evidence import EmbeddingConfig, SemBlendConfig
from dynamo_semkv.contracts.namespace import tenant_scope
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.deadline import DeadlineRunner, LookupStatus
from dynamo_semkv.evidence.embedding import EmbeddingProvider
from dynamo_semkv.evidence.encoder import OnnxEncoder, TokenizerFile
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.evidence.semblend import SemBlendProvider
from dynamo_semkv.testing import EventTape, ManualClock
from tests.bus.waiting import until, wait_for
from tests.evidence.documents import joined, namespace, query_of
from tests.evidence.test_deadline import AMPLE
from tests.evidence.test_embedding import words
from tests.evidence.test_semblend_provider import BagOfWords
from tests.evidence.tiny_models import write_encoder

HIT, MISS, SKIPPED = LookupStatus.HIT, LookupStatus.MISS, LookupStatus.SKIPPED
SALTS = ("a", "A", " a", "a ", " ", None)
"""What a careless comparison takes for the same."""
TEXTS = [words(n, 256) for n in range(3)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(SALTS),
        st.integers(0, len(TEXTS) - 1),
        st.sampled_from(("add", "add", "add", "evict", "reset", "move")),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def parts(models: Path) -> tuple[OnnxEncoder, TokenizerFile]:
    return OnnxEncoder(models), TokenizerFile(models)


def made(kind: str, parts: tuple[OnnxEncoder, TokenizerFile]) -> Any:
    if kind == "fingerprint":
        return FingerprintProvider()
    if kind == "semblend":
        return SemBlendProvider(SemBlendConfig(min_similarity=0.1, min_reuse_ratio=0.1), BagOfWords(), parts[1])
    return EmbeddingProvider(
        EmbeddingConfig(window_tokens=32, budget_ms=1_000.0, min_similarity=0.1, min_similarity_alone=0.1), *parts
    )


def settled(provider: Any) -> bool:
    state = provider.snapshot()
    if "queued" not in state:
        return True  # it adds where it is told
    counts = state["counts"]
    done = sum(counts.get(name, 0) for name in ("indexed", "registered", "stale", "failed", "refused"))
    return state["queued"] == 0 and counts.get("queued", 0) == done


@pytest.mark.parametrize("kind", ["fingerprint", "embedding", "semblend"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_no_history_shows_one_tenant_another(kind: str, parts: tuple[OnnxEncoder, TokenizerFile], steps: Any) -> None:
    provider = made(kind, parts)
    catalog = DonorCatalog([provider], clock=ManualClock())
    tapes = {salt: EventTape(worker_id=n + 1) for n, salt in enumerate(SALTS)}
    spaces = {salt: namespace(tenant_scope(salt)) for salt in SALTS}
    owner: dict[str, Any] = {}
    try:
        for tape in tapes.values():
            catalog.apply(tape.reset())
        for salt, text, how in steps:
            tape, donor_id = tapes[salt], f"{SALTS.index(salt)}-{text}"
            owner[donor_id] = salt
            if hasattr(provider, "prompt_routed"):
                provider.prompt_routed(query_of(TEXTS[text], spaces[salt]))
            if how == "evict":
                catalog.apply(tape.evict(donor_id))
            elif how == "reset":
                catalog.apply(tape.reset(f"{tape.generation}+"))  # all of this tenant's donors are gone
            else:
                catalog.apply(tape.register(donor_id, TEXTS[text], spaces[salt]))
        wait_for("registered", lambda: settled(provider))
        for salt, where in spaces.items():
            for text in TEXTS:
                prompt = joined(text[:-32], np.flip(text[:32]))
                found = {match.donor_id for match in provider.lookup(query_of(prompt, where))}
                assert {owner[donor_id] for donor_id in found} <= {salt}
    finally:
        if hasattr(provider, "close"):
            provider.close()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_nor_do_all_providers_together_with_a_store_that_is_always_full(
    parts: tuple[OnnxEncoder, TokenizerFile], steps: Any
) -> None:
    """Every registration evicts somebody, of this tenant or of another; rows and slots go from one tenant to the
    next."""
    together = [made(kind, parts) for kind in ("fingerprint", "semblend", "embedding")]
    catalog = DonorCatalog(
        together, clock=ManualClock(), limits=CatalogLimits(max_donors=3, max_donors_per_namespace=2)
    )
    runner = DeadlineRunner(together, AMPLE, 64)
    tapes = {salt: EventTape(worker_id=n + 1) for n, salt in enumerate(SALTS)}
    spaces = {salt: namespace(tenant_scope(salt)) for salt in SALTS}
    owner: dict[str, Any] = {}

    async def ask(tokens: Any, where: Any) -> set[str]:
        result = await runner.lookup(query_of(tokens, where))
        assert {status for status, _ in result.by_provider.values()} <= {HIT, MISS, SKIPPED}
        return {match.donor_id for match in result.matches}

    async def play() -> None:
        for tape in tapes.values():
            catalog.apply(tape.reset())
        for salt, text, how in steps:
            tape, donor_id = tapes[salt], f"{SALTS.index(salt)}-{text}"
            owner[donor_id] = salt
            await ask(TEXTS[text], spaces[salt])
            if how == "evict":
                catalog.apply(tape.evict(donor_id))
            elif how == "reset":
                catalog.apply(tape.reset(f"{tape.generation}+"))
            else:
                catalog.apply(tape.register(donor_id, TEXTS[text], spaces[salt]))
            await until("registered", lambda: all(map(settled, together)))
            for other, where in spaces.items():
                found = await ask(joined(TEXTS[text][:-32], np.flip(TEXTS[text][:32])), where)
                assert {owner[donor_id] for donor_id in found} <= {other}
        assert len(catalog) <= 3

    try:
        asyncio.run(play())
    finally:
        runner.close(timeout=10.0)


def test_the_property_can_fail(parts: tuple[OnnxEncoder, TokenizerFile]) -> None:
    """Each provider does find its own tenant's donor with these settings, so finding nobody else's means something."""
    for kind in ("fingerprint", "embedding", "semblend"):
        provider = made(kind, parts)
        catalog, tape, where = DonorCatalog([provider], clock=ManualClock()), EventTape(), namespace(tenant_scope("a"))
        catalog.apply(tape.reset())
        if hasattr(provider, "prompt_routed"):
            provider.prompt_routed(query_of(TEXTS[0], where))
        catalog.apply(tape.register("mine", TEXTS[0], where))
        wait_for("registered", lambda provider=provider: settled(provider))
        prompt = joined(TEXTS[0][:-32], np.flip(TEXTS[0][:32]))
        assert [match.donor_id for match in provider.lookup(query_of(prompt, where))] == ["mine"], kind
        if hasattr(provider, "close"):
            provider.close()
