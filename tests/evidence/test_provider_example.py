"""The provider that docs/writing-a-provider.md shows is run as it stands there: fed by a catalog, asked under the
deadline."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.config.evidence import EvidenceConfig
from dynamo_semkv.contracts.evidence import MatchType
from dynamo_semkv.contracts.namespace import CacheNamespace, tenant_scope
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.deadline import DeadlineRunner, LookupResult, LookupStatus
from dynamo_semkv.evidence.provider import DonorListener
from tests.evidence.catalogs import catalog, feed, tape_of
from tests.evidence.documents import BLOCK, document, joined, namespace, query_of

DOC = Path(__file__).resolve().parents[2] / "docs" / "writing-a-provider.md"
TEXT = document(1, 600)
"""What `tape_of` registers; its whole blocks are 576 tokens."""


def example() -> Any:
    (block,) = re.findall(r"^```python\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(DOC), "exec", dont_inherit=True), found)  # our own document
    return found["PrefixProvider"]()


class Setting:
    def __init__(self) -> None:
        self.provider = example()
        self.catalog: DonorCatalog
        self.catalog, _, _ = catalog(self.provider)
        self.runner = DeadlineRunner([self.provider], 30.0, 8)
        self.tape = tape_of("a")
        feed(self.catalog, self.tape)

    def ask(self, where: CacheNamespace, prompt: Any = TEXT) -> LookupResult:
        return asyncio.run(self.runner.lookup(query_of(prompt, where)))


@pytest.fixture
def setting() -> Iterator[Setting]:
    it = Setting()
    yield it
    it.runner.close()


def test_it_is_a_listener(setting: Setting) -> None:
    assert isinstance(setting.provider, DonorListener)


def test_it_finds_the_proven_prefix(setting: Setting) -> None:
    found = setting.ask(namespace(), joined(TEXT, document(2, 200)))
    assert found.status is LookupStatus.HIT
    (match,) = found.matches
    assert (match.donor_id, match.match_type, match.provider) == ("a", MatchType.EXACT_EQUIVALENT, "prefix")
    assert match.exact_prefix_tokens == match.reusable_token_count == len(TEXT) // BLOCK * BLOCK


def test_another_beginning_another_tenant_and_an_unknown_one_find_nothing(setting: Setting) -> None:
    assert setting.ask(namespace(), joined(document(2, 8), TEXT)).status is LookupStatus.MISS
    assert setting.ask(namespace(tenant_scope("other"))).status is LookupStatus.MISS
    assert setting.ask(namespace(None)).status is LookupStatus.MISS


@pytest.mark.parametrize("leave", ["evicted", "absent"])
def test_a_donor_that_left_is_not_found(setting: Setting, leave: str) -> None:
    if leave == "evicted":
        setting.catalog.apply(setting.tape.evict("a"))
    else:
        setting.catalog.purge_replica(1, 0)
    assert setting.ask(namespace()).status is LookupStatus.MISS


def test_the_thresholds_in_the_document_are_the_defaults() -> None:
    evidence = EvidenceConfig()
    table = dict(re.findall(r"^\| `([\w.]+)` \| ([\d.]+) \|", DOC.with_name("evidence.md").read_text(), re.MULTILINE))
    assert table.pop("evidence.min_overlap_tokens") == str(evidence.min_overlap_tokens)
    assert set(table) == {"min_shared_samples", "min_evidence", "min_run_tokens", "min_overlap_share"}
    assert {name: str(getattr(evidence.fingerprint, name)) for name in table} == table
