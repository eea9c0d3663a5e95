"""Random schedules with a disk below a slab of 16 blocks: whatever is evicted, written, brought up, held for, damaged
or reset, and in whatever order the disk comes to it, every page that a forward pass reads is right, nobody waits for
what cannot come, and books, donors and Dynamo's view agree with what is there."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.worker_connector.donors.test_device_events import Cache
from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.leader.test_residency import Recorder, believed_and_true
from tests.worker_connector.scripted import SIZE, ScriptedEngine
from tests.worker_connector.scripted_disk import disk_of, donors, flip, tier_of
from tests.worker_connector.test_random_engine import EngineMachine
from worker_connector.donors.donor import KEPT_SHARE
from worker_connector.donors.registry import SHRINK_SECONDS
from worker_connector.engine_api.request_view import RequestScope, unpack_tokens
from worker_connector.leader.disk_prefetch_wait import DiskPrefetchWait

_KEPT = 7 / 8
_LONG = st.lists(st.integers(0, 2), min_size=2, max_size=7).map(
    lambda heads: [t for head in heads for t in [head] * SIZE]
)


class DiskMachine(EngineMachine):
    @initialize(groups=st.sampled_from([(None,), (None, 9), (None, None)]), flat=st.booleans(), small=st.booleans())
    def start(self, groups: tuple[int | None, ...], flat: bool, small: bool) -> None:  # type: ignore[override]
        self.path = Path(tempfile.mkdtemp(prefix="semkv-disk-"))
        it = settings(
            MIB, min_offer_tokens=1, min_donor_tokens=8, max_leases=3, disk_path=str(self.path), disk_bytes=MIB
        )
        self.engine = ScriptedEngine(it, windows=groups, flat=flat and len(groups) == 1, num_pages=400, slots=16)
        if small:
            disk_of(self.engine).store._limit = 9_000  # about a dozen blocks
        self.running, self.asked, self.gone = [], [], []
        self.door = DiskPrefetchWait(self.engine.leader, it.connector, clock=lambda: self.engine.now)
        self.held: list[tuple[Future[int], int]] = []
        self.recorder = Recorder()
        self.cache = Cache(self.engine.leader)
        self.engine.leader.attach_residency(self.recorder)  # type: ignore[arg-type]

    @rule(orders=st.integers(1, 4))
    def disk_works(self, orders: int) -> None:
        disk_of(self.engine).run_pending(orders)

    @rule(data=st.data())
    def hint(self, data: st.DataObject) -> None:
        known = list(donors(self.engine.sink))  # in order of registration: ids are new in each process
        if known:
            self.engine.leader.hint_received(data.draw(st.sampled_from(known)))

    @rule(number=st.integers(0, 31))
    def hold(self, number: int) -> None:
        """What the door does before it waits, for a prompt that is on disk."""
        _, namespaces, _ = self.engine.leader.cache()
        assert namespaces is not None
        scopes = [RequestScope(salt, True, None, ()) for salt in (None, "a", "b")]
        ends = list(tier_of(self.engine).index.ends())  # in order of writing
        if not ends:
            return
        end = ends[number % len(ends)]
        (scope,) = [scope for scope in scopes if namespaces.of(scope)[1] == end.digest]
        tokens = [*unpack_tokens(b"".join(block.tokens for block in end.chain())), 0]
        found = self.door._find(tokens, scope)
        if found is not None and (done := self.door._hold(found, lambda: 0)) is not None:
            self.held.append((done, len(found.path)))

    @rule(number=st.integers(0, 7))
    def give_up(self, number: int) -> None:
        if self.held:
            done, _ = self.held.pop(number % len(self.held))
            tier_of(self.engine).give_up(done)

    def _in_order_of_writing(self) -> list[Path]:
        """Names are random: in their order, the same choice would be another block in each run of one schedule."""
        store = disk_of(self.engine).store
        return [path for path in map(store._path, list(store._names.values())) if path.exists()]

    @rule(data=st.data(), chance=st.integers(0, 3))
    def damage_a_file(self, data: st.DataObject, chance: int) -> None:
        found = self._in_order_of_writing()
        if found and chance == 3:
            chosen = data.draw(st.sampled_from(found))
            flip(chosen, data.draw(st.integers(0, chosen.stat().st_size - 1)))

    @rule(data=st.data(), chance=st.integers(0, 3))
    def lose_a_file(self, data: st.DataObject, chance: int) -> None:
        found = self._in_order_of_writing()
        if found and chance == 3:
            data.draw(st.sampled_from(found)).unlink()

    @rule(tokens=_LONG, salt=st.sampled_from([None, "a"]), orders=st.integers(0, 6), times=st.integers(1, 2))
    def serve(self, tokens: list[int], salt: str | None, orders: int, times: int) -> None:
        """Whole requests of one prompt; the disk comes to some of its work in between."""
        for _ in range(times):
            self.engine.serve(tokens, cache_salt=salt)
            disk_of(self.engine).run_pending(orders)

    @rule(tokens=_LONG, salt=st.sampled_from([None, "a"]), kept=st.integers(0, 6), lost=st.integers(0, 9))
    def engine_says(self, tokens: list[int], salt: str | None, kept: int, lost: int) -> None:
        """A prompt's blocks are on the device, or only the first ones still are; now and then events are lost."""
        self.cache.number += lost == 9
        self.cache.name = lambda path: hash((salt, tuple(path))) & (2**63 - 1)  # type: ignore[method-assign]
        self.cache.stored(tokens, cache_salt=salt)
        blocks = len(tokens) // SIZE
        if kept < blocks:
            self.cache.removed(tokens, *range(kept, blocks))

    @rule(chance=st.integers(0, 9))
    def reset_cache(self, chance: int) -> None:
        if chance == 9 and not self.asked:  # what was promised before it fails closed, as it should
            self.engine.leader.reset_cache()

    @rule()
    def a_second_passes(self) -> None:
        """Then donors that the slab began to lose are told as short as they are."""
        self.engine.now += SHRINK_SECONDS
        registry = self.engine.parts.event_publisher.donors
        assert registry is not None
        registry.tell_shrunk()
        assert not registry._changing

    @invariant()
    def router_s_belief_is_what_is_resident(self) -> None:
        if not hasattr(self, "engine"):
            return
        said = donors(self.engine.sink)
        registry = self.engine.parts.event_publisher.donors
        assert registry is not None
        assert set(said) == set(registry._donors)
        index = tier_of(self.engine).index
        for donor in registry._donors.values():
            end = donor.end
            assert end is not None
            on_device = 0 if donor.device is None else donor.device.ordinal + 1
            for ordinal, block in enumerate(end.chain()):
                in_slab = ordinal < donor.in_slab
                assert not in_slab or self.engine.leader._life.ledger.by_key(block.key) is not None  # type: ignore[union-attr]
                held = self.engine.parts.event_publisher.on_device(block.key)
                assert ordinal >= on_device or held
                assert in_slab or held or index.get(block.key) is not None
            tokens, tier = said[donor.donor_id]
            assert donor.blocks * 4 <= tokens
            if donor.donor_id in registry._changing:
                assert donor.blocks * 4 >= tokens * KEPT_SHARE
                continue
            assert donor.blocks * 4 >= tokens * _KEPT
            nearest = {"device": on_device, "host_pinned": donor.in_slab}
            assert tier == next((name for name, there in nearest.items() if there >= donor.blocks * _KEPT), "disk")

    @invariant()
    def dynamo_s_belief_is_the_slab(self) -> None:
        if hasattr(self, "engine"):
            believed, true = believed_and_true(self.engine, self.recorder)
            assert believed == true

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert all(0 <= done.result(0) <= blocks for done, blocks in self.held if done.done())
        waiting = [done for done, _ in self.held if not done.done()]
        tier = tier_of(self.engine)
        assert not waiting or tier._staging  # the slab has fewer blocks than may be on their way
        assert {id(wish.done) for wish in tier._wishes._awaited} == {id(done) for done in waiting}

    @invariant()
    def index_is_the_store(self) -> None:
        if not hasattr(self, "engine"):
            return
        tier, store = tier_of(self.engine), disk_of(self.engine).store
        if tier._clearing[0] or 0 not in tier._found:
            return
        assert {block.key for block in tier.index._blocks.values()} == set(store._names)
        for block in tier.index._blocks.values():
            assert block.parent is None or tier.index.get(block.parent.key) is block.parent

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            while disk_of(self.engine).run_pending():
                pass
            assert disk_of(self.engine).failed == 0
            super().teardown()
            while disk_of(self.engine).run_pending():
                pass
            assert tier_of(self.engine).in_flight == 0
            assert all(done.done() for done, _ in self.held)
            self.engine.idle()
            believed, true = believed_and_true(self.engine, self.recorder)
            assert believed == true
            self.engine.check_balance_of(16)
        finally:
            self.engine.rank.close()
            shutil.rmtree(self.path)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
