"""SemBlend 0.3.25's own emitter against our bus and catalog: separate processes, a real broker, nothing faked but the
embedder.

Its donors are taken, kept apart by tenant, and credited to nobody here: they carry no sketch, and no request's digest
is theirs.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.bus.subscriber import BusSubscriber
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.donor_events import DonorEvent, DonorEvicted, DonorRegistered
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.namespace import semblend_tenant_key, tenant_scope
from dynamo_semkv.evidence.emitters import WIRE_PREFIX
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.stream import Verdict
from dynamo_semkv.outcome.intake import Intake
from dynamo_semkv.testing import EventTape
from tests.bus.waiting import settings, until
from tests.evidence.catalogs import catalog, creditable, feed
from tests.evidence.documents import document, namespace, query_of
from tests.outcome.build import Listener

pytestmark = pytest.mark.graph

PROCESS = Path(__file__).with_name("semblend_process.py")
NAMESPACE = {"model": "m", "tokenizer": "t", "kv_layout": "l", "block_size": 32}
TEXT = document(5, 256)
TOKENS = TEXT.tolist()
VECTOR = [0.25] * 4
BOOT = 1_764_000_000_000
"""SemBlend's generation: milliseconds of the wall clock at which its process started."""


def register(donor_id: str, embedding: Any = VECTOR, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "register", {"donor_id": donor_id, "tokens": TOKENS, "embedding": embedding, **fields}


def evict(donor_id: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "evict", {"donor_id": donor_id, **fields}


RESET: tuple[str, dict[str, Any]] = ("reset", {})


class Side:
    """The router's side of the bus: subscriber, intake, catalog, fingerprint index."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.provider = FingerprintProvider()
        self.catalog, self.index, _ = catalog(self.provider)
        self.events: list[DonorEvent] = []
        self.verdicts: list[Verdict] = []
        self.subscriber = BusSubscriber(settings(url), "router")
        self.intake = Intake(
            self.subscriber, Listener().tracker, apply_donor_event=self._apply, announce=lambda announcement: None
        )

    def _apply(self, event: DonorEvent, stored_at: float) -> None:
        self.events.append(event)
        self.verdicts.append(self.catalog.apply(event, stored_at))

    async def run(self, *steps: Any, flavour: str = "dynamo", worker_id: int = 0, generation: int = BOOT) -> None:
        """A process of SemBlend's from start to end, and everything that it published taken in."""
        script = {
            "url": self.url,
            "flavour": flavour,
            "worker_id": worker_id,
            "generation": generation,
            "namespace": NAMESPACE,
            "steps": steps,
        }
        seen = self.intake.counts["donors.messages"]
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, str(PROCESS)],
            input=json.dumps(script),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        said = json.loads(ran.stdout)
        assert not said["torch"]
        await until("read", lambda: self.intake.counts["donors.messages"] >= seen + said["published"])
        assert self.intake.counts["donors.malformed"] == 0
        assert self.intake.counts["donors.unsupported_version"] == 0

    def partition(self, donor_id: str) -> str:
        return self.index.donors[donor_id].namespace_digest_hex


@pytest.fixture
async def side(nats_server: EmbeddedNats) -> AsyncIterator[Side]:
    it = Side(nats_server.url)
    await it.subscriber.start()
    await it.intake.start()
    # Core NATS keeps nothing: SemBlend may speak only once the stream is there to listen.
    await until("stream", lambda: it.subscriber.caught_up(subjects.DONOR_STREAM))
    yield it
    await it.intake.close()
    await it.subscriber.close()


def credited(side: Side) -> list[str]:
    """What SemBlend's prompt, sent by any tenant under a namespace that names the same model, finds."""
    tenants = [tenant_scope(None), tenant_scope("tenant-a"), semblend_tenant_key("tenant-a"), semblend_tenant_key(None)]
    spaces = [namespace(tenant, model="m", tokenizer="t", kv_layout="l") for tenant in tenants]
    return [match.donor_id for space in spaces for match in side.provider.lookup(query_of(TEXT, space))]


async def test_donors_arrive_in_the_partition_of_their_tenant(side: Side) -> None:
    await side.run(
        RESET,
        register("a1", cache_salt="tenant-a", extra_key="tenant-a"),
        register("a2", cache_salt="tenant-a", extra_key="tenant-a"),
        register("b1", cache_salt="tenant-b", extra_key="tenant-b"),
        register("none", cache_salt=None),
        register("unsaid"),
        register("no-embedding-no-event", embedding=None),
        register("gone", cache_salt="tenant-a"),
        evict("gone"),
        evict("a2", segments=[0]),
    )
    assert set(side.verdicts) == {Verdict.APPLIED}
    assert [type(event.data) for event in side.events[-2:]] == [DonorEvicted, DonorEvicted]
    assert creditable(side.catalog, 0) == {"a1", "b1", "none", "unsaid"}
    keys = {
        event.data.donor_id: event.data.namespace.extra["tenant_key"]
        for event in side.events
        if isinstance(event.data, DonorRegistered)
    }
    assert keys["a1"] == keys["a2"] == semblend_tenant_key("tenant-a")
    assert keys["b1"] == semblend_tenant_key("tenant-b")
    assert keys["none"] == keys["unsaid"] == semblend_tenant_key(None)
    assert len({side.partition(donor) for donor in ("a1", "b1", "none")}) == 3
    assert side.partition("none") == side.partition("unsaid")
    assert all(side.partition(donor).startswith(WIRE_PREFIX) for donor in side.index.donors)
    assert side.index.donors["a1"].location == WorkerLocation(0, 0, Tier.DEVICE)
    assert credited(side) == []


async def test_embeddings_of_any_kind_are_opaque(side: Side) -> None:
    vectors: dict[str, list[float]] = {
        "nan": [math.nan] * 4,
        "infinite": [math.inf, -math.inf],
        "empty": [],
        "one-dimension": [0.5],
        "384-dimensions": [0.1] * 384,
        "1024-dimensions": [0.1] * 1_024,
    }
    await side.run(RESET, *(register(donor_id, embedding=vector) for donor_id, vector in vectors.items()))
    assert set(side.verdicts) == {Verdict.APPLIED}
    assert creditable(side.catalog, 0) == set(vectors)
    registered = [event.data for event in side.events if isinstance(event.data, DonorRegistered)]
    for data in registered:
        vector = vectors[data.donor_id]
        assert data.segments[0].provider_metadata == struct.pack(f"<{len(vector)}f", *vector)
    assert all(donor.sketch is None for donor in side.index.donors.values())
    assert (len(side.provider), side.provider.counts["without_sketch"]) == (0, len(vectors))
    assert credited(side) == []


async def test_a_restarted_process_starts_over(side: Side) -> None:
    """Event ids from 0 again, a later generation, the same worker 0; then the first process, which was only slow,
    speaks once more."""
    await side.run(RESET, register("first"), register("both"))
    await side.run(RESET, register("both"), register("second"), generation=BOOT + 1)
    assert creditable(side.catalog, 0) == {"both", "second"}
    await side.run(RESET, register("first"), evict("second"))
    assert side.verdicts[-3:] == [Verdict.STALE_GENERATION] * 3
    assert creditable(side.catalog, 0) == {"both", "second"}


async def test_a_restart_that_keeps_its_generation_adds_nothing(side: Side) -> None:
    """Generation 0 is the emitter's default. Its events of the second epoch have ids that were seen: duplicates, never
    donors."""
    await side.run(RESET, register("first"), generation=0)
    await side.run(RESET, register("second"), generation=0)
    assert side.verdicts[-2:] == [Verdict.DUPLICATE] * 2
    assert creditable(side.catalog, 0) == {"first"}
    assert credited(side) == []


async def test_a_head_without_reset_is_understood(side: Side) -> None:
    await side.run(register("first"), generation=0)
    assert creditable(side.catalog, 0) == {"first"}


async def test_our_donors_stay_ours(side: Side) -> None:
    """A SemBlend process may not take, move, evict or purge what our connectors registered, nor place donors on their
    workers."""
    ours = namespace("")
    tape = EventTape(worker_id=7)
    tape.reset()
    tape.register("ours", TEXT, ours)
    feed(side.catalog, tape)
    await side.run(
        RESET,
        register("ours", embedding=VECTOR, cache_salt=None),
        register("theirs", cache_salt=None),
        ("relocate", {"donor_id": "ours", "location": {"kind": "shared", "backend": "s3", "tier": "disk"}}),
        (
            "relocate",
            {"donor_id": "theirs", "location": {"kind": "worker", "worker_id": 7, "dp_rank": 0, "tier": "disk"}},
        ),
        ("purge", {"scope": {"kind": "worker", "worker_id": 7}}),
        ("purge", {"scope": {"kind": "all"}}),
        flavour="trtllm",
    )
    assert side.verdicts == [
        Verdict.APPLIED,
        Verdict.FOREIGN_DONOR,
        Verdict.APPLIED,
        Verdict.FOREIGN_DONOR,
        Verdict.FOREIGN_LOCATION,
        Verdict.FOREIGN_SCOPE,
        Verdict.APPLIED,
    ]
    assert creditable(side.catalog, 0) == set()
    assert creditable(side.catalog, 7) == {"ours"}
    (match,) = side.provider.lookup(query_of(TEXT, ours))
    assert match.donor_id == "ours"


async def test_the_tensorrt_llm_emitter(side: Side) -> None:
    """It counts from 1, and its namespace has more fields: one that differs parts donors."""
    await side.run(RESET, register("a1", cache_salt="tenant-a"), flavour="trtllm")
    assert side.events[0].event_id == 1
    await side.run(
        RESET,
        register("a2", cache_salt="tenant-a"),
        register("b1", cache_salt="tenant-b"),
        (
            "relocate",
            {"donor_id": "a2", "location": {"kind": "worker", "worker_id": 3, "dp_rank": 0, "tier": "host_pinned"}},
        ),
        flavour="trtllm",
        worker_id=3,
    )
    assert set(side.verdicts) == {Verdict.APPLIED}
    assert side.partition("a1") == side.partition("a2") != side.partition("b1")
    assert side.index.donors["a2"].location == WorkerLocation(3, 0, Tier.HOST_PINNED)
    data = side.events[1].data
    assert isinstance(data, DonorRegistered)
    assert data.namespace.backend_cache_layout == "trtllm_pytorch_primary_pool_v1"
    assert credited(side) == []
