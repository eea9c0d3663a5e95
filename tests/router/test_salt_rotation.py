"""Rotating the salt key under traffic: routers and workers with the old and the new key beside each other, in any
order.

No tenant ever sees another's donors, whatever key either side has; at worst a tenant is cold until both sides have the
new key; requests without a salt notice nothing; nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_semkv.contracts.keys import block_keys, prompt_key
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY, CacheNamespace
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.router.facts import request_facts
from dynamo_semkv.router.pipeline import Prompt, narrow
from dynamo_semkv.router.replicas import ModelView, Standing
from dynamo_semkv.testing import EventTape, ManualClock
from tests.evidence.documents import BLOCK, document, namespace
from worker_connector.engine_api.request_view import RequestScope
from worker_connector.requests.engine_namespace import RequestNamespaces

KEYS = (DEFAULT_SALT_KEY, b"the key of before", b"the key of today")
"""None was configured; then one; then another."""
SALTS = ("a", "b", None)
ENGINE = namespace(None).for_request(tenant=None, lora=None, lora_revision=None, multimodal=None)
VIEW = ModelView(ENGINE, frozenset(), Standing.OK)
TEXT = document(5, 400)


def at_router(salt: str | None, key: bytes) -> Prompt:
    request = {"model": "m", "token_ids": TEXT.tolist(), "routing": {"cache_salt": salt} if salt else None}
    return narrow(request_facts(request), VIEW, key)


def at_worker(salt: str | None, key: bytes) -> CacheNamespace:
    found, _, problem = RequestNamespaces(ENGINE, {}, key).of(RequestScope(salt, True, None, ()))
    assert problem is None
    return found


def test_both_sides_agree_only_about_one_tenant_under_one_key() -> None:
    """Digest and prompt key, so neither donors nor reports nor hints of one are taken for another's."""
    for router_key, worker_key, salt, other in product(KEYS, KEYS, SALTS, SALTS):
        same = salt == other and (router_key == worker_key or salt is None)
        router, worker = at_router(salt, router_key), at_worker(other, worker_key)
        assert (router.digest == worker.digest()) == same
        assert (router.key == prompt_key(worker.digest(), TEXT)) == same


@dataclass
class Fleet:
    """Two workers and two routers, each with the key that it was started with."""

    worker_keys: list[bytes]
    router_keys: list[bytes]
    tapes: list[EventTape] = field(default_factory=lambda: [EventTape(worker_id=n + 1) for n in range(2)])
    owner: dict[str, str | None] = field(default_factory=dict)
    catalogs: list[tuple[DonorCatalog, FingerprintProvider]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.catalogs = [self._fresh() for _ in self.router_keys]
        for tape in self.tapes:
            self._tell(tape.reset)

    @staticmethod
    def _fresh() -> tuple[DonorCatalog, FingerprintProvider]:
        provider = FingerprintProvider()
        return DonorCatalog([provider], clock=ManualClock()), provider

    def _tell(self, make: object) -> None:
        assert callable(make)
        event = make()
        for catalog, _ in self.catalogs:
            catalog.apply(event)

    def restart_worker(self, at: int, key: bytes) -> None:
        """Its slab is gone, and its donors with it."""
        self.worker_keys[at] = key
        self._tell(lambda: self.tapes[at].reset(f"{self.tapes[at].generation}+"))

    def restart_router(self, at: int, key: bytes) -> None:
        """It replays what the bus has kept."""
        self.router_keys[at] = key
        self.catalogs[at] = self._fresh()
        for tape in self.tapes:
            for event in tape:
                self.catalogs[at][0].apply(event)

    def request(self, router: int, worker: int, salt: str | None) -> set[str]:
        """Donors that the router finds; then the worker serves the request and holds it."""
        prompt = at_router(salt, self.router_keys[router])
        chain = block_keys(prompt.digest, TEXT, BLOCK)
        query = LookupQuery(TEXT, prompt.namespace, prompt.digest, chain)
        found = {match.donor_id for match in self.catalogs[router][1].lookup(query)}
        donor = f"{len(self.owner)}"
        self.owner[donor] = salt
        served_in = at_worker(salt, self.worker_keys[worker])
        self._tell(lambda: self.tapes[worker].register(donor, TEXT, served_in))
        return found


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("worker"), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(st.just("router"), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(st.sampled_from(SALTS), st.integers(0, 1), st.integers(0, 1)),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(steps=STEPS, old=st.sampled_from(KEYS[:2]))
def test_rotated_in_any_order_no_tenant_sees_another_and_all_are_warm_in_the_end(
    steps: Sequence[tuple[str | None, int, int]], old: bytes
) -> None:
    new = KEYS[2]
    fleet = Fleet([old, old], [old, old])
    for what, first, second in steps:
        if what == "worker":
            fleet.restart_worker(first, new)
        elif what == "router":
            fleet.restart_router(first, new)
        else:
            assert {fleet.owner[donor] for donor in fleet.request(first, second, what)} <= {what}
    for at in range(2):
        fleet.restart_worker(at, new)
        fleet.restart_router(at, new)
    for salt in SALTS:
        assert fleet.request(0, 0, salt) == set()  # both slabs are empty after their restarts
        found = fleet.request(1, 0, salt)
        assert found
        assert {fleet.owner[donor] for donor in found} == {salt}


def test_between_two_keys_a_tenant_is_cold_and_a_request_without_salt_is_not() -> None:
    fleet = Fleet([KEYS[1], KEYS[1]], [KEYS[1], KEYS[1]])
    for salt in SALTS:
        fleet.request(0, 0, salt)
    fleet.restart_router(1, KEYS[2])
    assert [bool(fleet.request(1, 1, salt)) for salt in SALTS] == [False, False, True]
    assert [bool(fleet.request(0, 1, salt)) for salt in SALTS] == [True, True, True]
