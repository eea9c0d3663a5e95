"""A disk tier's books and its ranks' stores, without an engine."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

from dynamo_semkv.contracts.namespace import CacheNamespace
from tests.worker_connector.harness import MIB
from worker_connector.disk.index import DiskBlock
from worker_connector.disk.listeners import TierListeners
from worker_connector.disk.messages import DiskOrder, DiskResult
from worker_connector.disk.store import DiskStore
from worker_connector.disk.tier import DiskTier
from worker_connector.engine_api.request_view import pack_tokens
from worker_connector.ledger.block import BlockEntry
from worker_connector.ledger.ledger import Ledger
from worker_connector.memory.slab import HostSlab
from worker_connector.rank.disk import RankDisk


class Books:
    """A tier over a ledger of its own. Jobs for the background wait in `jobs`, orders in `sent`."""

    def __init__(self, slots: int = 8, ranks: int = 1) -> None:
        self.ledger = Ledger(slots, 4)
        self.sent: list[DiskOrder] = []
        self.jobs: deque[Any] = deque()
        self.staged: list[BlockEntry] = []
        self.gone: list[DiskBlock] = []
        self.namespace = CacheNamespace(model="m", tenant="")
        self.digest = self.namespace.digest()
        self.tier = DiskTier(
            self.ledger,
            64,
            TierListeners(staged=self.staged.extend, gone=self.gone.extend, found=lambda found: None),
            send=self.sent.append,
            submit=lambda job: self.jobs.append(job) is None,
            lock=threading.RLock(),
            ranks=ranks,
        )

    def save(self, tokens: list[int]) -> list[BlockEntry]:
        found: list[BlockEntry] = []
        for at in range(0, len(tokens), 4):
            entry = self.ledger.enter(self.digest, found[-1] if found else None, pack_tokens(tokens[at : at + 4]))
            assert entry is not None
            self.ledger.landed(entry)
            self.ledger.admit(entry)
            self.tier.admitted(self.namespace, entry)
            found.append(entry)
        self.tier.pump()
        return found

    def miss(self, tokens: list[int]) -> None:
        packed = pack_tokens(tokens)
        match = self.ledger.match(self.digest, packed, 100)
        if match.missing is not None:
            self.tier.missed(self.digest, packed, len(match.path), 100, match.missing)

    def run_jobs(self) -> None:
        while self.jobs:
            self.jobs.popleft()()


class Store:
    """A rank of `books`: a slab and a disk store, no engine."""

    def __init__(self, books: Books, number: int, path: Path, limit: int = MIB) -> None:
        self.slab = HostSlab(books.ledger.slots, 64)
        self.store = DiskStore(path / f"rank-{number}", f"{number:016d}", 64, limit)
        self.answers: list[DiskResult] = []
        self.disk = RankDisk(number, self.store, self.slab, self.answers.append, manual=True)
        self.number = number
        for slot in range(self.slab.slots):
            self.slab.break_seals([slot])
            self.slab.rows[slot] = 17 * number + slot
            self.slab.seal([slot])

    def obey(self, books: Books, orders: list[DiskOrder]) -> None:
        for order in orders:
            self.disk.order(order)
        self.disk.run_pending()
        answers, self.answers = self.answers, []
        self.disk._post = self.answers.append
        for answer in answers:
            books.tier.on_result(answer)


def begin(books: Books, ranks: list[Store]) -> None:
    books.tier.begin()
    answered(books, ranks)
    books.run_jobs()


def answered(books: Books, ranks: list[Store]) -> None:
    while books.sent:
        orders, sent = list(books.sent), len(books.sent)
        del books.sent[:sent]
        for rank in ranks:
            rank.obey(books, orders)
