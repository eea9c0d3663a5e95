"""ActiveRequests: requests that own pages, from their first report to their end, and what becomes of their blocks.

Ends: `complete` (it ended by itself: what is resident becomes a donor), `retire` (its allocation was destroyed),
`vanished` (nobody has heard of it). Blocks that became resident and blocks that left are handed to the event_publisher
in this order, and a donor only after its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamo_semkv.contracts.namespace import CacheNamespace
from worker_connector.disk.tier import DiskTier
from worker_connector.leader.event_publisher import EventPublisher
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.requests.request_state import RequestState
from worker_connector.requests.save_planner import SavePlanner


class ActiveRequests:
    """Not thread-safe: the leader's lock covers it."""

    def __init__(
        self, ledger: Ledger | None, saves: SavePlanner | None, event_publisher: EventPublisher, open_digest: bytes
    ) -> None:
        """`open_digest`: of requests without salt, adapter and media."""
        self._ledger = ledger
        self._saves = saves
        self._event_publisher = event_publisher
        self.open_digest = open_digest
        self.tracked: dict[int, RequestState] = {}
        """By id; only read elsewhere."""
        self._finishing: list[RequestState] = []
        self._given: dict[tuple[int, int], int] = {}
        """(layer group, page) -> the request that it was reported for last, other than as a prefix that is shared."""
        self.disk: DiskTier | None = None
        """Told of every block that becomes resident, where there is a tier below the slab."""

    def __len__(self) -> int:
        return len(self.tracked)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self.tracked

    @property
    def finishing(self) -> int:
        """Ended requests whose last copies have not landed."""
        return len(self._finishing)

    def get(self, request_id: int) -> RequestState | None:
        """What is known of a request; None if it does not run."""
        return self.tracked.get(request_id)

    def add(self, tracked: RequestState) -> None:
        """Takes a request in that was reported for the first time."""
        self.tracked[tracked.request_id] = tracked

    def batch_dropped(self, iteration: int, tokens_per_block: int) -> None:
        """No forward pass came behind that iteration's reports: what its requests grew by may be given back, and pages
        that come instead are not reported (py_executor.py, `_revert_gen_alloc`)."""
        for tracked in self.tracked.values():
            if tracked.seen == iteration:
                tracked.doubt_last_pages(tokens_per_block)

    def given(self, request_id: int, pages: Iterable[tuple[int, int]]) -> int:
        """The request was given these pages, which it shares with nobody: whoever was reported to have one before and
        still runs has it no more, and nothing of it may be saved from there. Returns how many were somebody's."""
        pages, given, taken = tuple(pages), self._given, 0
        owners = list(map(given.get, pages))
        given.update(dict.fromkeys(pages, request_id))
        if set(owners) <= {None, request_id}:
            return 0
        for page, before in zip(pages, owners, strict=True):
            if before is not None and before != request_id and (other := self.tracked.get(before)) is not None:
                taken += other.pages.lose(*page)
        return taken

    # ends

    def retire(self, request_id: int) -> None:
        """The request's allocation was destroyed: what is not proven of it never will be."""
        tracked = self.tracked.pop(request_id, None)
        if tracked is not None:
            self._withdraw(tracked)

    def finish(self, request_id: int, *, cancelled: bool) -> None:
        """It ended by itself, or (`cancelled`) was ended: then it donates nothing."""
        tracked = self.tracked.pop(request_id, None)
        if tracked is None:
            return
        if cancelled:
            self._withdraw(tracked)
        else:
            self._complete(tracked)
        self.flush()

    def vanished(self, seen_before: int) -> list[int]:
        """Takes out the requests that no report has named since that iteration, and returns their ids."""
        gone = [t for t in self.tracked.values() if t.seen <= seen_before]
        for tracked in gone:
            self.retire(tracked.request_id)
        return [tracked.request_id for tracked in gone]

    def landed(self) -> None:
        """Copies have landed: ended requests that waited for them may become donors."""
        waiting, self._finishing = self._finishing, []
        for tracked in waiting:
            self._donate_when_saved(tracked)

    def forget_blocks(self) -> None:
        """The bytes are there and worth nothing. Requests that run go on, and save nothing more."""
        for tracked in self.tracked.values():
            self._withdraw(tracked)
            tracked.donates = False
        self._finishing.clear()
        if self._ledger is not None:
            self._ledger.clear()
            self._ledger.take_departed()
        if self._saves is not None:
            self._saves.take_admitted()

    def close(self) -> None:
        """Forgets all requests and withdraws the saves that have not begun."""
        for tracked in list(self.tracked.values()):
            self._withdraw(tracked)
        self.tracked.clear()

    def _withdraw(self, tracked: RequestState) -> None:
        if self._saves is not None:
            self._saves.withdraw(tracked)

    def _complete(self, tracked: RequestState) -> None:
        if self._saves is None:
            if tracked.donates:
                computed = min(tracked.scheduled, tracked.token_count)
                self._event_publisher.donor_computed(
                    tracked.namespace, tracked.digest, bytes(tracked.tokens[: computed * 4])
                )
            return
        self._saves.finished(tracked)
        self._donate_when_saved(tracked)

    def _donate_when_saved(self, tracked: RequestState) -> None:
        """What a request computed or was served becomes a donor, as far as it is resident once its last copy has
        landed."""
        if tracked.pending:
            self._finishing.append(tracked)
            return
        self._note_admitted()
        tip = next((entry for entry in reversed(tracked.chain) if entry.resident), None)
        if tip is not None and tracked.donates:
            self._event_publisher.donor_resident(tracked.namespace, tip)

    # residency

    def scoped(self, entry: BlockEntry) -> bool:
        """Does the block belong to a request with a salt, an adapter or media?"""
        return entry.digest != self.open_digest

    def flush(self) -> None:
        """Hands on what became resident and what left, in this order."""
        self._note_admitted()
        if self._ledger is not None and self._ledger.departed:
            self._event_publisher.departed(self._ledger.take_departed())

    def staged(self, entries: Sequence[BlockEntry]) -> None:
        """Consecutive blocks of a chain became resident from disk or another worker. What left before is told
        first."""
        self.flush()
        self._event_publisher.stored(entries, salted=self.scoped(entries[0]))

    def kept(self, namespace: CacheNamespace, entries: Sequence[BlockEntry]) -> None:
        """Blocks of another worker stay: their pull is over, and nothing has called them back. Not before:
        the disk gives nothing back."""
        if self.disk is not None:
            for entry in entries:
                self.disk.admitted(namespace, entry)
            self.disk.pump()

    def _note_admitted(self) -> None:
        """Tells the event_publisher of blocks that became resident, runs of one chain together."""
        if self._saves is None or not self._saves.admitted:
            return
        run: list[BlockEntry] = []
        for tracked, entry in self._saves.take_admitted():
            if self.disk is not None:
                self.disk.admitted(tracked.namespace, entry)
            if run and entry.parent is not run[-1]:
                self._event_publisher.stored(run, salted=self.scoped(run[0]))
                run = []
            run.append(entry)
        if run:
            self._event_publisher.stored(run, salted=self.scoped(run[0]))
        if self.disk is not None:
            self.disk.pump()
