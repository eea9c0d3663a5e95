"""The provider protocol: from a prompt to related donors. One method, plus small optional capabilities.

A provider runs in a thread of its own under a deadline that it does not know. It is handed token ids only: no stage may
tell identity from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.keys import BlockKey, TokenArray
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.evidence.donor import CatalogDonor


class LookupQuery(msgspec.Struct, frozen=True):
    """One prompt to find donors for."""

    tokens: TokenArray
    """Shape [n], u32: the prompt as Dynamo's preprocessor made it."""
    namespace: CacheNamespace
    """With the request's tenant, adapter and media in it."""
    digest: bytes
    """`namespace.digest()`, 32 bytes: the partition to search, and the only one."""
    chain: Sequence[BlockKey]
    """Block keys of the prompt's full blocks."""


class EvidenceProvider(Protocol):
    """Any exception is a miss with a reason. Results are a list or tuple in any order; after 1,000 matches the rest is
    not read, and a match with more than 256 segments is unsound."""

    @property
    def name(self) -> str:
        """Short and unique among the configured providers; metrics and matches carry it."""
        ...

    def lookup(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """Matches for the prompt, from the provider's own thread. What is found after the deadline is dropped."""
        ...


@runtime_checkable
class DonorListener(Protocol):
    """Called by the catalog, in its thread, with what to index. Adding an id again replaces it.

    `donor_removed` may be late for donors whose epoch is over: a listener checks `CatalogDonor.creditable` before it
    hands out a match.
    """

    def donor_added(self, donor: CatalogDonor) -> None:
        """Index the donor, or replace what is indexed under its id."""
        ...

    def donor_removed(self, donor_id: str) -> None:
        """Drop the donor; the id may be unknown."""
        ...


@runtime_checkable
class PromptListener(Protocol):
    """Gets every prompt after its lookup, in the event loop: for providers that learn a donor's text from the prompt
    that became it. It must be quick."""

    def prompt_routed(self, query: LookupQuery) -> None:
        """Take note of the prompt. An exception is counted, and costs the provider this prompt only."""
        ...


@runtime_checkable
class Closes(Protocol):
    """Ends what the provider started; called once, after the last lookup."""

    def close(self, timeout: float) -> None:
        """End threads and release files within `timeout` seconds."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """Bounded, JSON-able state for the page and for operators; no prompts, no digests of salts."""

    def snapshot(self) -> dict[str, Any]:
        """The state, as a dict that JSON can hold and of at most 64 KiB."""
        ...
