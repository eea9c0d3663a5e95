"""RequestState: what the leader knows of one request that has pages: its tokens, pages and how far they are computed.

Tokens come from the engine's reports, each once (ai-dynamo/dynamo#5620), and positions are the engine's, never our own
sums.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.report import Reason
from worker_connector.engine_api.pages import PageTable
from worker_connector.engine_api.request_view import pack_tokens
from worker_connector.ledger.block import BlockEntry
from worker_connector.requests.attempt import Attempt

NEVER = sys.maxsize


@dataclass(eq=False, slots=True)
class PendingSave:
    """One block on its way into the slab. It may be offered when it has landed *and* is known to have been computed."""

    entry: BlockEntry
    end: int
    """First token position after the block."""
    landed: bool = False
    computed: bool = False


@dataclass(eq=False, slots=True)
class RequestState:
    """What the leader knows of a running request: its tokens, pages, and how far its KV is computed and saved."""

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
    started: int = 0
    """Where the forward pass of the last report starts."""
    pages_before: int = 0
    """Blocks that had pages before the last report."""
    pages_since: int = 0
    """Blocks that have had pages since, where the last report was read whole."""
    chain: list[BlockEntry] = field(default_factory=list)
    """Blocks from the start that are in the ledger, resident or pending."""
    pending: deque[PendingSave] = field(default_factory=deque)
    saving: bool = True
    """False: no further block of it is saved (a page is missing, its chain was evicted, or its tokens are in doubt)."""
    donates: bool = True
    """False: its KV is not a function of tokens and namespace, or its namespace is not wholly known."""
    seen: int = 0
    """Iteration of the last report."""
    quiet_until: int = 0
    """A report of one more token and no page, of a forward pass that ends before this position, changes nothing but
    numbers: no block is completed, and nothing of it waits for an answer. Others keep `tokens`, `computed`,
    `scheduled`, `started`, `seen` and `pages_before` (leader/scheduler_output.py)."""

    @property
    def token_count(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.tokens) // 4

    def doubt_last_pages(self, tokens_per_block: int) -> None:
        """What it grew by with the last report may not be its any more."""
        self.quiet_until = 0
        self.pages.doubt(max(self.pages_before, -(-self.started // tokens_per_block)))

    def note_quiet(self, tokens_per_block: int, *, waits: bool) -> None:
        """Behind a report that was read whole. `waits`: a load of its may still be confirmed."""
        self.pages_since = len(self.pages)
        if waits or self.pending:
            self.quiet_until = 0
        elif self.saving:
            self.quiet_until = (len(self.chain) + 1) * tokens_per_block
        else:
            self.quiet_until = NEVER

    def take(self, data: Any, iteration: int) -> None:
        """One report of the engine: what it learnt and allocated since the last one."""
        self.pages_before = len(self.pages)
        self.tokens.extend(pack_tokens(data.new_tokens))
        self.pages.extend(data.new_block_ids, getattr(data, "new_block_ids_by_layer_group", None))
        self.computed = max(int(data.computed_position), 0)
        self.seen = iteration


def begin(data: Any, attempt: Attempt, group_ids: Sequence[int], iteration: int, *, saves: bool) -> RequestState:
    """From a request's first report since its pages were allocated. `scheduled` is the caller's to set."""
    question = attempt.question
    request = RequestState(
        int(data.request_id), attempt.namespace, attempt.digest, PageTable(group_ids), question.prompt_tokens
    )
    request.donates = question.problem in (None, Reason.MATERIALIZATION_OFF)
    request.saving = saves and question.problem is None
    request.take(data, iteration)
    return request
