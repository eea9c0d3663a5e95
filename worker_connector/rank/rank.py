"""Rank: the connector's worker side without an engine in it. It owns one rank's slab and obeys the leader's orders.

Order of an iteration: `start_load` before the forward pass, `forward_done` behind it, `poll` in every iteration, also
idle ones. The metadata of an iteration is executed once, however often the engine calls: it stays bound until the next.

A fault while saving costs the blocks. A fault while loading is raised: the engine counts those tokens as computed
already, and the API has no way to take that back (KV Cache Connector doc; NVIDIA/TensorRT-LLM connector ABC of #18762),
unless its runtime has one (leader/api_variants.py).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dynamo_semkv.config.host_memory import available_memory
from dynamo_semkv.telemetry.throttled import Throttled
from worker_connector.disk.messages import DiskOrder
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.errors import LoadFailed, Refused
from worker_connector.link.channel import ForwardDone, LoadDone, RankChannel, RankReady, SaveDone, SlotsDamaged
from worker_connector.link.leader_link import LeaderLink
from worker_connector.link.metadata import ConnectorMetadata, LoadOrder, SaveOrder
from worker_connector.memory.copy_stream import CopyStream, CpuStream, Ticket
from worker_connector.memory.slab import OFFER_BUDGET, HostSlab, slots_for
from worker_connector.memory.slab_scrubber import Scrubber, SlabScrubber
from worker_connector.memory.transfer import copy_stream_for, copy_to_pages, load_by_layer, prepare_copies
from worker_connector.rank.disk import RankDisk
from worker_connector.rank.landing import LandingLoads
from worker_connector.rank.layer_hooks import LayerHooks
from worker_connector.rank.load_checks import check_load
from worker_connector.rank.load_thread import LoadThread
from worker_connector.rank.options import CopyPlace, RankOptions
from worker_connector.rank.save_copies import RankSaves

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


class Rank:
    """The engine's calls come from its thread; `verify` and `verify_soon` from the leader's, which is the same one in
    TensorRT-LLM."""

    def __init__(self, channel: RankChannel, number: int, options: RankOptions) -> None:
        """`number`: of the rank among those of its leader."""
        self._number = number
        self._options = options
        self._inline = options.inline
        self.restarts_failed = options.restarts_failed
        self._loads: LoadThread | None = None
        self._disk: RankDisk | None = None
        self._untaken: set[int] = set()
        self._without_pages: set[int] = set()
        self._geometry: PoolGeometry | None = None
        self._stream: CopyStream = CpuStream()
        self._save_stream: CopyStream = CpuStream()
        self.hooks = LayerHooks((), trusted=False)
        self._slab: HostSlab | None = None
        self._scrubber: Scrubber | None = None
        self._keeper: SlabScrubber | None = None
        self._saves: RankSaves | None = None
        self._loaded = 0
        self._forwarded = 0
        self._awaiting_forward: ConnectorMetadata | None = None
        self.counts: Counter[str] = Counter()
        """`loaded_blocks`, `saved_blocks`, `load_errors`, `save_errors`, `moved_channel`, `foreign_channel`,
        `called_leader`, `restarted`; of parked loads `late_loads`, `repeated_loads`."""
        self._link = LeaderLink(channel, self, number, options.apart, self.counts)
        self._landing = LandingLoads(number)

    # bring-up

    def register(self, geometry: PoolGeometry, *, keeps_pages: bool = True) -> None:
        """Takes the pool, makes the slab and opens the disk store. Raises Refused when one of them does not fit.

        `keeps_pages` False: the engine may free a parked request's pages while they are being filled.
        """
        if self._options.async_loads and not keeps_pages:
            raise Refused(
                "connector.async_load_min_tokens",
                "a number",
                "this KV cache manager frees the pages of a cancelled request while a load may still write them",
                "set it to null, or kv_cache_config.use_kv_cache_manager_v2: true",
            )
        self.close()
        self._geometry = geometry
        self._stream = copy_stream_for(geometry.device)
        self.hooks = LayerHooks(geometry.layers, trusted=self._options.trust_layer_hooks)
        self._save_stream = copy_stream_for(geometry.device)  # a load need not wait behind a long save
        if self._options.slab_bytes is not None:
            self._make_slab(geometry, self._options.slab_bytes)
        ready = RankReady(
            rank=self._number,
            tokens_per_block=geometry.tokens_per_block,
            group_ids=geometry.group_ids,
            windows=geometry.windows,
            bytes_per_block=geometry.bytes_per_block,
            kv_dtype=geometry.dtype,
            kv_layout=geometry.fingerprint,
            slots=self._slab.slots if self._slab is not None else 0,
            incarnation=self._slab.incarnation if self._slab is not None else secrets.token_hex(8),
            block_size_configured=geometry.block_size_configured,
        )
        if self._disk is not None:
            self._disk.start()
        self._link.post(ready)

    def _make_slab(self, geometry: PoolGeometry, slab_bytes: int) -> None:
        """The host memory of blocks, what checks it, what copies from and to it, and the disk below it."""
        options = self._options
        slots = slots_for(slab_bytes, geometry.bytes_per_block, available_memory())
        slab = self._slab = HostSlab(slots, geometry.bytes_per_block, pinned=geometry.device.type == "cuda")
        prepare_copies(self._stream, geometry, slab, by_layer=options.trust_layer_hooks)
        self._scrubber = Scrubber(slab, self._on_damaged)
        self._keeper = SlabScrubber(str(self._number), self._scrubber, inline=self._inline)
        place = CopyPlace(self._number, geometry, slab, self._link.post, self._on_damaged, self.counts)
        self._saves = RankSaves(place)
        self._loads = LoadThread(
            place,
            copy_stream_for(geometry.device),
            self._stream,
            deadline_seconds=options.async_deadline_seconds,
            restarts_failed=options.restarts_failed_parked,
            run=(lambda job: job()) if self._inline else None,
        )
        if options.disk is not None:
            store = options.disk.open(geometry.fingerprint, geometry.bytes_per_block)
            self._disk = RankDisk(self._number, store, slab, self._link.post, manual=self._inline)

    def meet(self, metadata: ConnectorMetadata, find: Callable[[int], RankChannel | None]) -> None:
        """Speaks to the leader that made this metadata from now on."""
        self._link.follow(metadata, find)

    def shut(self) -> None:
        """The engine ends: what `close` does, and the connection to a leader elsewhere. Idempotent."""
        self.close()
        self._link.close()

    def close(self) -> None:
        """Ends the threads, waits for the copies that are under way, and gives the slab back."""
        if self._disk is not None:
            self._disk.close()  # it reads and writes the slab
            self._disk = None
        if self._loads is not None:
            self._loads.close()
        if self._keeper is not None:
            self._keeper.close()
        for stream in (self._stream, self._save_stream):
            stream.ticket().wait()  # before the slab's memory goes
        self._loads = None
        self._keeper = self._scrubber = self._slab = self._saves = None

    @property
    def slab(self) -> HostSlab | None:
        """The host memory of blocks; None before it was made, and after `close`."""
        return self._slab

    @property
    def keeper(self) -> SlabScrubber | None:
        """The thread that computes and checks checksums; None where the caller does it, and after `close`."""
        return self._keeper

    @property
    def disk_thread(self) -> RankDisk | None:
        """The disk below the slab; None without one."""
        return self._disk

    @property
    def scrubber(self) -> Scrubber | None:
        """Which slots are to be checked next; None before the slab was made, and after `close`."""
        return self._scrubber

    def start_load(self, metadata: ConnectorMetadata | None, engine_stream: Any) -> None:
        """Enqueues this iteration's loads in front of its forward pass. Raises LoadFailed if one cannot be done."""
        self._save_stream.before(engine_stream)  # saves of earlier passes read pages that this pass may own now
        hooks = self.hooks
        if hooks.tickets:
            self._stream.before(engine_stream)
            hooks.waited_elsewhere()
        if metadata is not None and metadata.idle and metadata.iteration != self._loaded and self.at_rest():
            self._loaded = metadata.iteration
            self._awaiting_forward = metadata
            return
        self.poll()
        self._start_parked(metadata, engine_stream)
        if metadata is None or metadata.iteration == self._loaded:
            return
        self.iteration_over()
        self._loaded = metadata.iteration
        for to_disk in metadata.disk:
            self.disk(to_disk)
        self.hooks.pass_begins()
        self._awaiting_forward = metadata
        self._untaken.clear()
        self._without_pages.clear()
        for request_id, why, parked in metadata.unloadable:
            if parked:
                continue  # not in this batch: `finished_loads` answers for it
            if request_id is None or not self.restarts_failed:
                self._fail_all(metadata)
                raise LoadFailed(why)
            self._restart(request_id, why)
        if metadata.loads:
            self._load_all(metadata, engine_stream)

    def before_layer(self, layer: int, engine_stream: Any) -> None:
        """The engine is about to enqueue this layer. It may never say so: see rank/layer_hooks.py."""
        self.hooks.before_layer(layer, engine_stream, recording=bool(self.hooks.tickets) and self._stream.recording())

    def forward_done(self, metadata: ConnectorMetadata | None, engine_stream: Any) -> None:
        """Enqueues this iteration's saves behind its forward pass. An exception here fails every running request, so
        there is none, but for a forward pass that ran with a request whose load had failed, or in front of its loads:
        LoadFailed."""
        if metadata is None or metadata.iteration == self._forwarded:
            return
        self._forwarded = metadata.iteration
        self._awaiting_forward = None
        if metadata.idle and not self._untaken and not self.hooks.watching:
            self._link.idle_forward_done(metadata.iteration)
            return
        if self._untaken:
            self._drop_saves(metadata)
            raise LoadFailed(
                f"the engine did not take requests {sorted(self._untaken)}, whose loads failed, out of its batch"
            )
        if not self.hooks.pass_done():
            self.counts["layer_hooks_missed"] += 1
            self._drop_saves(metadata)
            raise LoadFailed(
                "the engine ran a layer without calling wait_for_layer_load; set connector.trust_layer_hooks: false"
            )
        self._link.post(ForwardDone(self._number, metadata.iteration))
        saves, without = metadata.saves, self._without_pages
        if without:
            self._not_saved([order for order in saves if order.request_id in without])
            saves = tuple(order for order in saves if order.request_id not in without)
        if saves:
            self._save(saves, engine_stream)

    def at_rest(self) -> bool:
        """Nothing is left over of earlier iterations: no forward pass is due, no load is on its way, and the engine
        waits for none. `iteration_over` and `finished_loads` have nothing to do."""
        if self._awaiting_forward is not None or self._landing or self._untaken or self._without_pages:
            return False
        loads = self._loads
        return loads is not None and not (loads.busy or self.hooks.watching or self.hooks.tickets)

    def finished_loads(self, parked: Collection[int]) -> list[int]:
        """`get_finished`, in every iteration: requests whose parked loads have ended, each once. `parked`: ids that it
        names for the first time. Raises LoadFailed if one cannot be loaded and the engine cannot be told (see
        rank/load_thread.py)."""
        self.poll()
        if self._loads is not None:
            return self._loads.finished(parked)
        if parked:
            raise LoadFailed(f"the engine parked {sorted(parked)}, and there is no slab on this rank")
        return []

    def take_failed_parked(self) -> set[int]:
        """Of the requests that `finished_loads` has named: those whose pages were not filled. Once."""
        return self._loads.take_failed() if self._loads is not None else set()

    def iteration_over(self) -> None:
        """No forward pass comes behind the last `start_load` any more: the batch was dropped or emptied, or the pass
        failed. Its saves are answered as not done; without an answer their slots would stay pending for ever."""
        metadata, self._awaiting_forward = self._awaiting_forward, None
        if metadata is not None and metadata.iteration != self._forwarded:
            self._drop_saves(metadata)

    def take_failed(self) -> set[int]:
        """Requests of the last `start_load` whose pages were not all written. Once: the caller keeps them out of the
        forward pass."""
        failed, self._untaken = self._untaken, set()
        return failed

    def drop_saves_of(self, request_ids: Collection[int]) -> None:
        """These requests leave the coming forward pass, says the engine: their pages will not hold what was to be
        saved."""
        self._without_pages.update(request_ids)

    def poll(self) -> None:
        """Reports loads whose copies have landed, in order."""
        for result in self._landing.landed():
            self._link.post(result)

    def verify(self, slots: Sequence[int]) -> list[int]:
        """Those of the slots whose bytes do not have their checksum; all of them without a slab."""
        return list(slots) if self._slab is None else self._slab.verify(slots, OFFER_BUDGET)

    def verify_soon(self, slots: Sequence[int]) -> None:
        """Has the slots checked before others."""
        if self._scrubber is not None:
            self._scrubber.urgent(slots, loaded=False)

    def make_resets_durable(self) -> None:
        """Returns when what resets deleted is gone from the disk too."""
        if (disk := self._disk) is not None:
            disk.make_resets_durable()

    def disk(self, order: DiskOrder) -> None:
        """Hands an order of the leader to the disk; without a disk it is ignored."""
        if self._disk is not None:
            self._disk.order(order)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for metrics and tests."""
        slab, scrubber, keeper = self._slab, self._scrubber, self._keeper
        return {
            "counts": dict(self.counts),
            "sealed": slab.sealed if slab is not None else 0,
            "checked": scrubber.checked if scrubber is not None else 0,
            "damaged": scrubber.damaged if scrubber is not None else 0,
            "sealing_failed": keeper.failed if keeper is not None else 0,
            "disk_failed": self._disk.failed if self._disk is not None else 0,
            "files": dict(self._disk.store.counts) if self._disk is not None else None,
        }

    def _start_parked(self, metadata: ConnectorMetadata | None, engine_stream: Any) -> None:
        """Before anything else of an iteration: what is stopped may not write into pages that its forward pass uses."""
        loads = self._loads
        if loads is None:
            return
        if metadata is not None and metadata.iteration != self._loaded:
            loads.stop(metadata.abandoned)
        loads.fence(engine_stream)
        if metadata is None or metadata.iteration == self._loaded:
            return
        loads.nothing_to_load(metadata.nothing_to_load)
        for request_id, why, parked in metadata.unloadable:
            if parked and request_id is not None:
                loads.cannot_load(request_id, why)
        loads.begin(metadata.async_loads, metadata.iteration, engine_stream)

    def _load_all(self, metadata: ConnectorMetadata, engine_stream: Any) -> None:
        self._stream.after(engine_stream)
        began = self._stream.mark()
        tickets = self._load_by_layer(metadata)
        loaded: list[LoadOrder] = []
        first_error: BaseException | None = None
        for order in metadata.loads:
            if order.key.request_id in self._without_pages:
                self._answer(order, metadata, ok=False)
                continue
            try:
                self._load(order, metadata, copied=tickets is not None)
            except Exception as error:  # noqa: BLE001 - answered and raised below, after the other orders had their turn
                self._answer(order, metadata, ok=False)
                if self.restarts_failed:
                    self._restart(order.key.request_id, str(error))
                else:
                    first_error = first_error or error
                continue
            loaded.append(order)
        if tickets is None:
            self._stream.before(engine_stream)
        self.hooks.loads_begin(tickets)
        self._landing.add(metadata.iteration, loaded, began, self._stream.mark())
        self.poll()
        if first_error is not None:
            self._drop_saves(metadata)
            raise LoadFailed(f"a promised load failed: {first_error}") from first_error

    def _load_by_layer(self, metadata: ConnectorMetadata) -> Mapping[int, Ticket] | None:
        """All loads of a pass together, where its layers wait for them one by one. None: each is to be copied alone."""
        if not self.hooks.reliable:
            return None
        orders = [order for order in metadata.loads if order.key.request_id not in self._without_pages]
        moves = [move for order in orders for move in order.moves]
        try:
            checked = [self._check(order, metadata) for order in orders]
            return load_by_layer(self._stream, *checked[0], moves) if checked else None
        except Exception:  # noqa: BLE001 - each order gets its turn, and its answer, alone
            _throttled.exception(
                "semkv connector: loads of %d requests by layer failed; they are done one by one", len(orders)
            )
            return None

    def _check(self, order: LoadOrder, metadata: ConnectorMetadata) -> tuple[PoolGeometry, HostSlab]:
        if self._slab is None or self._geometry is None:
            raise LoadFailed("there is no slab on this rank")
        check_load(order, metadata, self._geometry, self._slab, self._on_damaged if self._options.apart else None)
        return self._geometry, self._slab

    def _load(self, order: LoadOrder, metadata: ConnectorMetadata, *, copied: bool) -> None:
        geometry, slab = self._check(order, metadata)
        if not copied:
            copy_to_pages(self._stream, geometry, slab, order.moves)
        self.counts["loaded_blocks"] += len(order.moves)
        if self._scrubber is not None:
            self._scrubber.urgent([move.slot for move in order.moves], loaded=True)

    def _answer(self, order: LoadOrder, metadata: ConnectorMetadata, *, ok: bool) -> None:
        self.counts["load_errors"] += 0 if ok else 1
        self._link.post(LoadDone(self._number, metadata.iteration, order.key, ok))

    def _restart(self, request_id: int, why: str) -> None:
        _throttled.error("semkv connector: request %d is restarted without what it was offered: %s", request_id, why)
        self.counts["restarted"] += 1
        self._untaken.add(request_id)
        self._without_pages.add(request_id)

    def _fail_all(self, metadata: ConnectorMetadata) -> None:
        for order in metadata.loads:
            self._answer(order, metadata, ok=False)
        self._drop_saves(metadata)

    def _drop_saves(self, metadata: ConnectorMetadata) -> None:
        self._forwarded = metadata.iteration
        self._not_saved(metadata.saves)

    def _not_saved(self, orders: Sequence[SaveOrder]) -> None:
        for order in orders:
            self._link.post(SaveDone(self._number, order.save_id, False))

    def _save(self, orders: Sequence[SaveOrder], engine_stream: Any) -> None:
        if self._saves is None or self._keeper is None:
            _throttled.error("semkv connector: rank %d has no slab, and is to save into it", self._number)
            self.counts["save_errors"] += len(orders)
            self._not_saved(orders)
            return
        self._saves.save(orders, self._save_stream, engine_stream, self._keeper)

    def _on_damaged(self, slots: Sequence[int], loaded: bool) -> None:
        self._link.post(SlotsDamaged(self._number, tuple(slots), loaded))
