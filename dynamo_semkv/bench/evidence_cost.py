"""What the fingerprint provider costs: `python -m dynamo_semkv.bench.evidence_cost --donors 1000 10000 --tokens 8192`.

Synthetic documents that are built like text (`alike.py`), each prompt with several donors, one namespace, all in this
process and on one thread. It measures cost; whether the right donor is found is measured on text by `bench.evidence`,
not here (the share of right answers is printed so that a fast wrong one is seen).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np

from dynamo_semkv.bench.alike import FAMILY, alike, asked, donors_of, unknown
from dynamo_semkv.config.evidence import FingerprintConfig
from dynamo_semkv.contracts.codec import MSGPACK, decode_donor_event, encode_donor_event
from dynamo_semkv.contracts.donor_events import DonorEvent
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.location import Tier
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.limits import CatalogLimits
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.evidence.worker import SWITCH_SECONDS
from dynamo_semkv.testing import EventTape

NAMESPACE = CacheNamespace(model="bench", tokens_per_block=32, tenant="")
VOCABULARY = 50_000
_EVENTS = 2_000
"""How many moves are measured, and how many evictions."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Cost:
    """The figures of one index size. Times in microseconds, unless named otherwise."""

    donors: int
    tokens: int
    register_p50: float
    """One event from its bytes to the index: decode, catalog, postings."""
    register_max: float
    registers_per_second: float
    """By the thread's processor time, as `at_capacity_per_second`: what it does when nothing else wants the core."""
    at_capacity_per_second: float
    """Registrations into a full store: each evicts another donor."""
    moves_per_second: float
    """Donors whose KV moved to another tier; with the index, as all rates."""
    evictions_per_second: float
    longest_own: float
    """The longest registration, move or eviction, by the thread's processor time."""
    hit_p50: float
    hit_p99: float
    right: float
    """Share of the hits that named a right donor first."""
    matches: float
    """How many donors a hit named, on average."""
    miss_p50: float
    miss_p99: float
    false_matches: int
    evict_p50: float
    beside_p50: float
    beside_p99: float
    """A hit by the clock, in a thread beside another that registers into the full store as fast as it can."""
    beside_max: float
    stall_p99: float
    stall_max: float
    """A registration by the clock, beside those lookups: the time that an event loop would stand still."""
    bytes_per_donor: float
    """Growth of this process's resident memory, per donor."""
    posting_bytes_per_donor: float


def document(seed: int, tokens: int) -> TokenArray:
    """Random tokens, u32 of shape [tokens]; the same for the same seed."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(np.uint32)


@dataclass(frozen=True)
class _Filling:
    """What filling the store and then adding to the full store took."""

    registers: list[float]
    """Seconds of each event by the clock."""
    own: list[float]
    """Seconds of each event by the thread's processor time."""
    grown: int
    """Bytes of resident memory that filling the store added."""


@dataclass(frozen=True)
class _Lookups:
    """Lookups that find donors, and lookups that find none."""

    prompts: list[LookupQuery]
    hits: list[float]
    """Seconds of each."""
    misses: list[float]
    named: list[list[str]]
    """Donor ids that each hit named, best first."""
    right: int
    false: int


def measure(donors: int, tokens: int, lookups: int = 300) -> Cost:
    """Fills an index with `donors` documents and measures each operation. Repeatable but for the clock."""
    provider = FingerprintProvider(FingerprintConfig(max_donors=donors, max_donors_per_namespace=donors))
    limits = CatalogLimits(max_donors=donors, max_donors_per_namespace=donors, max_bytes=2**62)
    catalog = DonorCatalog([provider], clock=time.monotonic, limits=limits)
    extra = max(1, donors // 10)
    total = donors + extra + min(extra, 2_000)
    gc.collect()
    gc.freeze()  # as the router does once it has started
    events = _registrations(total, tokens)
    filling = _fill(catalog, events, donors, extra)
    oldest = -(-extra // FAMILY)
    found = _look_up(provider, range(oldest, max(oldest + 1, (donors + extra) // FAMILY)), tokens, lookups)
    late = [decode_donor_event(raw, MSGPACK) for raw in events]
    beside, stalls = _beside(provider, catalog, found.prompts[:50], late)
    posting_bytes = provider.snapshot()["posting_bytes"]
    moves, evicts = _move_and_evict(catalog, total, min(donors, _EVENTS))
    gc.unfreeze()
    registers, own = filling.registers, filling.own
    return Cost(
        donors=donors,
        tokens=tokens,
        register_p50=_micros(registers, 0.5),
        register_max=_micros(registers, 1.0),
        registers_per_second=donors / sum(own[1 : donors + 1]),
        at_capacity_per_second=extra / sum(own[donors + 1 :]),
        moves_per_second=len(moves) / sum(moves),
        evictions_per_second=len(evicts) / sum(evicts),
        longest_own=1e6 * max(*own, *moves, *evicts),
        hit_p50=_micros(found.hits, 0.5),
        hit_p99=_micros(found.hits, 0.99),
        right=found.right / lookups,
        matches=sum(map(len, found.named)) / lookups,
        miss_p50=_micros(found.misses, 0.5),
        miss_p99=_micros(found.misses, 0.99),
        false_matches=found.false,
        evict_p50=_micros(evicts, 0.5),
        beside_p50=_micros(beside, 0.5),
        beside_p99=_micros(beside, 0.99),
        beside_max=_micros(beside, 1.0),
        stall_p99=_micros(stalls, 0.99),
        stall_max=_micros(stalls, 1.0),
        bytes_per_donor=filling.grown / donors,
        posting_bytes_per_donor=posting_bytes / donors,
    )


def _fill(catalog: DonorCatalog, events: Iterator[bytes], donors: int, extra: int) -> _Filling:
    """Applies the reset, `donors` registrations and `extra` more, each of which evicts a donor."""
    registers: list[float] = []
    own: list[float] = []
    grown = 0
    before = _resident_bytes()
    for n, raw in enumerate(islice(events, donors + extra + 1)):
        own_began, began = time.thread_time(), time.perf_counter()
        _apply(catalog, raw)
        registers.append(time.perf_counter() - began)
        own.append(time.thread_time() - own_began)
        if n == donors:  # the first event is the reset
            grown = _resident_bytes() - before
    return _Filling(registers, own, grown)


def _look_up(provider: FingerprintProvider, families: range, tokens: int, lookups: int) -> _Lookups:
    """Prompts of no family, then prompts of families whose donors are all in the store."""
    queries = [_query(unknown(n, tokens)) for n in range(lookups)]
    misses = [_seconds(partial(provider.lookup, query)) for query in queries]
    false = sum(bool(provider.lookup(query)) for query in queries)
    chosen = np.random.default_rng(1).integers(families.start, families.stop, lookups).tolist()
    prompts = [_query(asked(family, n, tokens)) for n, family in enumerate(chosen)]
    hits = [_seconds(partial(provider.lookup, query)) for query in prompts]
    named = [[match.donor_id for match in provider.lookup(query)] for query in prompts]
    right = sum(found[:1] != [] and found[0] in donors_of(family) for found, family in zip(named, chosen, strict=True))
    return _Lookups(prompts, hits, misses, named, right, false)


def _move_and_evict(catalog: DonorCatalog, registered: int, count: int) -> tuple[list[float], list[float]]:
    """Processor time of each of `count` moves, then of the evictions of the same donors: the latest of `registered`."""
    tape = EventTape()
    tape.skip(registered + 1)
    ids = [str(registered - 1 - n) for n in range(count)]
    device = tape.here(Tier.DEVICE)
    moves = _own_seconds(catalog, [encode_donor_event(tape.relocate(one, device), MSGPACK) for one in ids])
    return moves, _own_seconds(catalog, [encode_donor_event(tape.evict(one), MSGPACK) for one in ids])


def _beside(
    provider: FingerprintProvider, catalog: DonorCatalog, queries: Sequence[LookupQuery], events: Sequence[DonorEvent]
) -> tuple[list[float], list[float]]:
    """Seconds of each lookup and of each registration while both go on, in two threads as in a router. The first lookup
    begins before the first registration, so there is always one."""
    found: list[float] = []
    begun, done = threading.Event(), threading.Event()

    def look_up() -> None:
        for query in cycle(queries):
            begun.set()
            found.append(_seconds(partial(provider.lookup, query)))
            if done.wait(0.0005):
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = threading.Thread(target=look_up, name="semkv-bench-lookups")
    try:
        thread.start()
        begun.wait()
        stalls = [_seconds(partial(catalog.apply, event)) for event in events]
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    return found, stalls


def _registrations(donors: int, tokens: int) -> Iterator[bytes]:
    """A reset and `donors` registrations, made by another process: memory used to make them would be counted as the
    index's."""
    command = [sys.executable, "-m", "dynamo_semkv.bench.evidence_cost", "--emit", "--donors", str(donors)]
    with subprocess.Popen([*command, "--tokens", str(tokens)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(donors + 1):
            (length,) = _LENGTH.unpack(process.stdout.read(_LENGTH.size))
            yield process.stdout.read(length)


def _emit(donors: int, tokens: int) -> None:
    """Writes the events to standard output, each after its length."""
    tape = EventTape()
    events = chain([tape.reset()], (tape.register(str(n), alike(n, tokens), NAMESPACE) for n in range(donors)))
    for event in events:
        raw = encode_donor_event(event, MSGPACK)
        sys.stdout.buffer.write(_LENGTH.pack(len(raw)) + raw)
        tape.events.clear()


def _apply(catalog: DonorCatalog, raw: bytes) -> None:
    catalog.apply(decode_donor_event(raw, MSGPACK))


def _query(tokens: TokenArray) -> LookupQuery:
    return LookupQuery(tokens, NAMESPACE, NAMESPACE.digest(), [])


def _own_seconds(catalog: DonorCatalog, events: Sequence[bytes]) -> list[float]:
    """Processor time of this thread for each event."""
    found = []
    for raw in events:
        began = time.thread_time()
        _apply(catalog, raw)
        found.append(time.thread_time() - began)
    return found


def _seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _micros(seconds: Sequence[float], quantile: float) -> float:
    return float(np.quantile(seconds, quantile)) * 1e6


def _resident_bytes() -> int:
    """Resident memory, after freed memory was given back to the system; otherwise the next thing measured would seem to
    need none."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def show(cost: Cost) -> str:
    """The figures in one line."""
    return (
        f"{cost.donors:>7} donors x {cost.tokens} tokens | register p50 {cost.register_p50:.0f} us, max "
        f"{cost.register_max / 1000:.1f} ms; of its own {cost.registers_per_second:.0f}/s, at capacity "
        f"{cost.at_capacity_per_second:.0f}/s, moves {cost.moves_per_second:.0f}/s, evictions "
        f"{cost.evictions_per_second:.0f}/s, longest {cost.longest_own / 1000:.1f} ms | {cost.matches:.1f} donors a "
        f"hit, hit p50 {cost.hit_p50:.0f} us, p99 {cost.hit_p99:.0f} us, right {cost.right:.3f} | miss p50 "
        f"{cost.miss_p50:.0f} us, p99 {cost.miss_p99:.0f} us, false {cost.false_matches} | evict p50 "
        f"{cost.evict_p50:.0f} us | hit beside registrations p50 {cost.beside_p50 / 1000:.2f} ms, p99 "
        f"{cost.beside_p99 / 1000:.1f} ms, max {cost.beside_max / 1000:.1f} ms; registration beside hits p99 "
        f"{cost.stall_p99 / 1000:.1f} ms, max {cost.stall_max / 1000:.1f} ms | {cost.bytes_per_donor:.0f} bytes a "
        f"donor (postings {cost.posting_bytes_per_donor:.0f})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line; measures each number of donors and prints a line for it."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_semkv.bench.evidence_cost", description=__doc__)
    parser.add_argument("--donors", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--emit", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.emit:
        _emit(arguments.donors[0], arguments.tokens)
        return 0
    for donors in arguments.donors:
        print(show(measure(donors, arguments.tokens)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
