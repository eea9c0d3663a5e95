"""TrackedRequest: what the leader knows of one request that has pages: its tokens, pages and how far they are computed.

Tokens come from the engine's reports, each once (ai-dynamo/dynamo#5620), and positions are the engine's, never our own sums.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.ledger import BlockEntry
from worker_connector.pages import PageTable


@dataclass(eq=False)
class PendingSave:
    """One block on its way into the slab. It may be offered when it has landed *and* is known to have been computed."""

    entry: BlockEntry
    end: int
    """First token position after the block."""
    landed: bool = False
    computed: bool = False


@dataclass(eq=False)
class TrackedRequest:
    request_id: int
    namespace: CacheNamespace
    digest: bytes
    pages: PageTable
    prompt_tokens: int
    tokens: bytearray = field(default_factory=bytearray)
    """Packed u32: prompt, then what was generated."""
    computed: int = 0
    """Positions below hold valid KV, says the last report."""
    scheduled: int = 0
    """Positions below will hold valid KV once the forward pass of the last report has run."""
    chain: list[BlockEntry] = field(default_factory=list)
    """Blocks from the start that are in the ledger, resident or pending."""
    pending: deque[PendingSave] = field(default_factory=deque)
    saving: bool = True
    """False: no further block of it is saved (a page is missing, its chain was evicted, or its tokens are in doubt)."""
    donates: bool = True
    """False: its KV is not a function of tokens and namespace, or its namespace is not wholly known."""
    seen: int = 0
    """Iteration of the last report."""
    finished: bool = False

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4

    def block_tokens(self, ordinal: int, tokens_per_block: int) -> bytes:
        step = 4 * tokens_per_block
        return bytes(self.tokens[ordinal * step : (ordinal + 1) * step])
