"""Which replicas are alive, which engine process each one is, and in which namespace they cache.

Pure: it is fed with what Dynamo's discovery lists and with the engines' announcements, and does no I/O. Discovery alone
decides who is alive; an announcement only says what a live replica is. A replica that is alive but has not announced
itself is routed to by Dynamo as ever and gets no advice.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from dynamo_semkv.config.schema import Materialization
from dynamo_semkv.contracts.announcement import ReplicaAnnouncement
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica, check_stable_routing_id, stable_worker_id
from dynamo_semkv.contracts.namespace import CacheNamespace, agreed_namespace, differing_field
from dynamo_semkv.observe.health import listed
from dynamo_semkv.router.announcements import Announcements
from dynamo_semkv.router.runtime_types import ReplicaCard, WorkerRole
from dynamo_semkv.router.shared_ids import SharedIds
from dynamo_semkv.scoring.credit import mode_of
from dynamo_semkv.telemetry.throttled import Throttled

_throttled = Throttled(logging.getLogger(__name__))

MAX_MODELS = 64
"""How many model names' answers are kept; a question about a further name is worked out each time."""


class Standing(str, Enum):
    """Why a live replica may, or may not, be advised. Closed: readiness and counters use it as a label."""

    OK = "ok"
    NO_STABLE_ID = "no_stable_id"
    """Started without DYN_STABLE_ROUTING_ID: its engine's announcements and reports cannot be told from another's."""
    STABLE_ID_SHARED = "stable_id_shared"
    """Several live instances carry its stable id, for longer than a restart takes: what arrives under that id may come
    from any of them."""
    UNANNOUNCED = "unannounced"
    """No connector has announced it (yet)."""
    BLOCK_SIZE_MISMATCH = "block_size_mismatch"
    """Card and announcement disagree on tokens per block: one of the two counts blocks that do not exist."""
    MODEL_DIFFERS = "model_differs"
    """Announced for another model than the one in question."""
    NAMESPACE_DIFFERS = "namespace_differs"
    """It announces another namespace than most workers of the model. As the standing of a model: no namespace has a
    majority."""
    ROLE_DIFFERS = "role_differs"
    """A decode worker beside aggregated ones, say: it does not compute the prompts that this router places."""


@dataclass(frozen=True)
class ModelView:
    """What is known of one model at one moment: the common namespace and the replicas that may be advised."""

    namespace: CacheNamespace | None
    """Without the fields of a request. None: no advice, and `standing` says why."""
    eligible: frozenset[ReplicaKey]
    standing: Standing
    differing: Mapping[ReplicaKey, str] = field(default_factory=dict)
    """Replicas whose namespace is not the common one, and the first field in which it differs; all replicas where there
    is no common one."""


class ReplicaProfile(msgspec.Struct, frozen=True):
    """What every decision needs to know of a live replica."""

    card: ReplicaCard
    stable: StableReplica | None
    name: str
    """`stable_routing_id/dp_rank`; the instance id instead of a stable id where there is none."""
    mode: Materialization
    fits: bool
    """Whether its worker does what this router is in front of."""


@dataclass
class _Known:
    card: ReplicaCard
    seen: int
    """Order of first sight: of two instances with one stable id the later one is the restarted process."""
    stable: StableReplica | None
    """Read from the card; None for a worker without a stable id."""


def _stable(replica: ReplicaKey, card: ReplicaCard) -> StableReplica | None:
    return StableReplica(card.stable_routing_id, replica.dp_rank) if card.stable_routing_id is not None else None


class ReplicaDirectory:
    """Live replicas by instance and by stable id.

    `on_removed(wire_worker_id, dp_rank)` is called once for every name under which donors of a replica that went may be
    catalogued: its instance id always, its stable worker id only when no other live instance carries it. A restarted
    worker that is already listed again therefore keeps its donors until its own generation reset clears them.

    `on_present(wire_worker_id, dp_rank, generation)` is called, possibly again and again, for a live replica that has
    announced its generation. What a replica announced before it went does not count when it comes back: it may be
    another process by then.

    `on_ranks(wire_worker_id, ranks)` is called with the ranks of a live worker by its model card, whenever they change;
    with none once it is gone.
    """

    def __init__(
        self,
        on_removed: Callable[[int, int], object] | None = None,
        on_present: Callable[[int, int, str], object] | None = None,
        on_ranks: Callable[[int, frozenset[int]], object] | None = None,
    ) -> None:
        self._on_removed = on_removed
        self._on_ranks = on_ranks
        self._on_present = on_present
        self._public_model: str | None = None
        self._role = WorkerRole.UNKNOWN
        self._live: dict[ReplicaKey, _Known] = {}
        self._by_wire: dict[tuple[int, int], ReplicaKey] = {}
        self.announced = Announcements()
        self._ranks: dict[int, frozenset[int]] = {}
        self._views: dict[str, ModelView] = {}
        self._agreed: dict[str, CacheNamespace] = {}
        """The namespace that each model's workers agreed on last: it stays where they are split evenly."""
        self._profiles: dict[ReplicaKey, ReplicaProfile] | None = None
        self._cards: dict[ReplicaKey, ReplicaCard] = {}
        self._sights = 0
        self._shared = SharedIds()
        self.counts: Counter[str] = Counter()
        """`removed`, `unresolved` and one per Standing that kept a replica from advice."""

    def serve_as(self, public_model: str, role: WorkerRole = WorkerRole.UNKNOWN) -> None:
        """The name under which this router offers the model (requests carry it, whatever the engines call it), and
        which workers it is in front of. UNKNOWN: any."""
        self._public_model = public_model
        self._role = role
        self._changed()

    def fits(self, card: ReplicaCard) -> bool:
        """Whether a worker has the role that this router places requests for. One whose card names no role fits: Dynamo
        lists it at our endpoint."""
        return self._role is WorkerRole.UNKNOWN or card.role is self._role or card.role is WorkerRole.UNKNOWN

    def update_live(self, live: Mapping[ReplicaKey, ReplicaCard]) -> None:
        """Replaces the set of live replicas by what discovery and the model cards list now."""
        gone = {replica: known.card for replica, known in self._live.items() if replica not in live}
        changed = bool(gone)
        new = []
        for replica in gone:
            del self._live[replica]
        for replica, card in live.items():
            known = self._live.get(replica)
            if known is None:
                self._sights += 1
                self._live[replica] = _Known(card, self._sights, _stable(replica, card))
                new.append(replica)
                changed = True
            elif known.card != card:
                known.card, known.stable = card, _stable(replica, card)
                changed = True
        if not changed:
            return
        self._by_wire = self._wire_names()
        self.announced.list(known.stable for known in self._live.values() if known.stable is not None)
        self._report_ranks()
        self._cards = {replica: known.card for replica, known in self._live.items()}
        self._changed()
        for replica, card in gone.items():
            self._report_removed(replica, card)
        for replica in new:
            self._report_present(replica)

    def tidy(self, now: float) -> None:
        """Updates what changes by time alone; call it every second or so. `now`: monotonic seconds."""
        if self._shared.update(((replica, known.stable) for replica, known in self._live.items()), now):
            self._changed()

    def announce(self, announcement: ReplicaAnnouncement) -> None:
        """Takes over an announcement. The last one of a replica counts, whether or not discovery lists it yet; those of
        a live worker only for the ranks on its card."""
        stable = StableReplica(announcement.stable_routing_id, announcement.dp_rank)
        before = self.announced.get(stable)
        if not self.announced.put(announcement):
            return
        wire = wire_id(stable.stable_routing_id)
        replica = self._by_wire.get((wire, stable.dp_rank)) if wire is not None else None
        if replica is None:
            return
        # An announcement that differs in its numbers only changes nothing that is derived.
        if before is None or _decisive(before) != _decisive(announcement):
            self._changed()
        self._report_present(replica)

    def resolve(self, worker_id: int, dp_rank: int) -> ReplicaKey | None:
        """The live replica of a worker id from the wire, which is either an instance id or `stable_worker_id` of one.

        None, counted, for a replica that is not alive: a donor there is no evidence (production-stack#1061).
        """
        replica = self._by_wire.get((worker_id, dp_rank))
        if replica is None:
            self.counts["unresolved"] += 1
        return replica

    def stable_of(self, replica: ReplicaKey) -> StableReplica | None:
        """The stable id and rank by the replica's card; None for a replica that is gone or has no stable id."""
        known = self._live.get(replica)
        return known.stable if known is not None else None

    def generation_of(self, replica: ReplicaKey) -> str | None:
        """The generation that the replica's engine announced last."""
        announcement = self._announcement(replica)
        return announcement.generation if announcement is not None else None

    def announcement_of(self, replica: ReplicaKey) -> ReplicaAnnouncement | None:
        """What the replica's engine announced last; None where it is not alive or announced nothing."""
        return self._announcement(replica)

    def live(self) -> Mapping[ReplicaKey, ReplicaCard]:
        """All live replicas and their cards. The mapping is replaced, never changed."""
        return self._cards

    def profiles(self) -> Mapping[ReplicaKey, ReplicaProfile]:
        """The profiles of all live replicas. Made anew when discovery or an announcement changes something."""
        if self._profiles is None:
            self._profiles = {replica: self._profile(replica, known) for replica, known in self._live.items()}
        return self._profiles

    def is_live(self, replica: ReplicaKey) -> bool:
        """Whether discovery lists the replica."""
        return replica in self._live

    def view_of(self, model: str) -> ModelView:
        """The namespace that all advisable replicas of `model` share. Cached until discovery or an announcement changes
        something."""
        view = self._views.get(model)
        if view is None:
            view = self._view(model)
            if len(self._views) < MAX_MODELS:
                self._views[model] = view
        return view

    def standings(self, model: str | None = None) -> dict[ReplicaKey, Standing]:
        """Each live replica's standing by itself, without a comparison of namespaces; `model` None: for whatever it
        announces."""
        return {replica: self._standing(replica, model) for replica in self._live}

    def shown(self) -> dict[ReplicaKey, tuple[Standing, str | None]]:
        """The standing of every live replica under the name that clients ask for; with NAMESPACE_DIFFERS the first
        field that differs."""
        found: dict[ReplicaKey, tuple[Standing, str | None]] = {
            replica: (standing, None) for replica, standing in self.standings().items()
        }
        models = {it.model for replica in self._live if (it := self._announcement(replica)) is not None}
        for model in {self._public_model} if self._public_model is not None else models:
            for replica, name in self.view_of(model).differing.items():
                found[replica] = (Standing.NAMESPACE_DIFFERS, name)
        return found

    def _changed(self) -> None:
        self._views.clear()
        self._profiles = None

    def _profile(self, replica: ReplicaKey, known: _Known) -> ReplicaProfile:
        stable, announced = known.stable, self._announcement(replica)
        shown = stable or StableReplica(str(replica.worker_id), replica.dp_rank)
        name = f"{shown.stable_routing_id}/{shown.dp_rank}"
        mode = mode_of(announced.materialization if announced is not None else None)
        return ReplicaProfile(known.card, stable, name, mode, self.fits(known.card))

    def _announcement(self, replica: ReplicaKey) -> ReplicaAnnouncement | None:
        return self.announced.get(self.stable_of(replica))

    def _standing(self, replica: ReplicaKey, model: str | None) -> Standing:
        known = self._live[replica]
        card = known.card
        if not self.fits(card):
            return Standing.ROLE_DIFFERS
        if known.stable is None:
            return Standing.NO_STABLE_ID
        if known.stable in self._shared:
            return Standing.STABLE_ID_SHARED
        announcement = self._announcement(replica)
        if announcement is None:
            return Standing.UNANNOUNCED
        if card.block_size != announcement.namespace.tokens_per_block:
            return Standing.BLOCK_SIZE_MISMATCH
        if model is not None and model not in (announcement.model, self._public_model):
            return Standing.MODEL_DIFFERS
        return Standing.OK

    def _view(self, model: str) -> ModelView:
        announced: dict[ReplicaKey, ReplicaAnnouncement] = {}
        kept_out: Counter[Standing] = Counter()
        for replica, standing in sorted(self.standings(model).items()):
            announcement = self._announcement(replica)
            if standing is Standing.OK and announcement is not None:
                announced[replica] = announcement
            else:
                kept_out[standing] += 1
                if standing is not Standing.MODEL_DIFFERS:
                    self.counts[standing.value] += 1
        if not announced:
            reason = kept_out.most_common(1)[0][0] if kept_out else Standing.UNANNOUNCED
            return ModelView(None, frozenset(), reason)
        return self._agree(model, announced)

    def _agree(self, model: str, announced: Mapping[ReplicaKey, ReplicaAnnouncement]) -> ModelView:
        before = self._agreed.get(model)
        common = agreed_namespace(((it.stable_routing_id, it.namespace) for it in announced.values()), before)
        reference = common or next(iter(announced.values())).namespace
        differing = {
            replica: name
            for replica, it in announced.items()
            if (name := differing_field(reference, it.namespace)) is not None
        }
        if differing:
            self._warn(model, common, differing)
        if common is None:
            differing = dict.fromkeys(announced, next(iter(differing.values())))
            return ModelView(None, frozenset(), Standing.NAMESPACE_DIFFERS, differing)
        if model in self._agreed or len(self._agreed) < MAX_MODELS:
            self._agreed[model] = common
        return ModelView(common, frozenset(announced.keys() - differing.keys()), Standing.OK, differing)

    def _warn(self, model: str, common: CacheNamespace | None, differing: Mapping[ReplicaKey, str]) -> None:
        self.counts[Standing.NAMESPACE_DIFFERS.value] += 1
        differences = listed(f"{self.profiles()[replica].name} in {name}" for replica, name in differing.items())
        _throttled.warning(
            "model %r: replicas announce different namespaces: %s; no advice for %s",
            model,
            differences,
            "it until most workers agree" if common is None else "these, the others are most and go on",
            key=differences,
        )

    def _wire_names(self) -> dict[tuple[int, int], ReplicaKey]:
        names: dict[tuple[int, int], ReplicaKey] = {}
        for replica, known in sorted(self._live.items(), key=lambda item: item[1].seen):
            if known.card.stable_routing_id is not None:
                wire = wire_id(known.card.stable_routing_id)
                if wire is not None:
                    names[(wire, replica.dp_rank)] = replica
        # Instance ids come last, so that a hash never hides a real instance.
        names.update({(replica.worker_id, replica.dp_rank): replica for replica in self._live})
        return names

    def _report_ranks(self) -> None:
        before, ranks = self._ranks, defaultdict[int, set[int]](set)
        for worker_id, dp_rank in self._by_wire:
            ranks[worker_id].add(dp_rank)
        self._ranks = {worker_id: frozenset(found) for worker_id, found in ranks.items()}
        if self._on_ranks is None:
            return
        for worker_id in before.keys() | self._ranks.keys():
            now = self._ranks.get(worker_id, frozenset())
            if now != before.get(worker_id, frozenset()):
                self._on_ranks(worker_id, now)

    def _report_removed(self, replica: ReplicaKey, card: ReplicaCard) -> None:
        self.counts["removed"] += 1
        names = [replica.worker_id]
        stable = card.stable_routing_id
        if stable is not None and (wire := wire_id(stable)) is not None:
            names.append(wire)
        for name in names:
            if (name, replica.dp_rank) not in self._by_wire and self._on_removed is not None:
                self._on_removed(name, replica.dp_rank)

    def _report_present(self, replica: ReplicaKey) -> None:
        announcement = self._announcement(replica)
        if self._on_present is None or announcement is None:
            return
        for name in (replica.worker_id, wire_id(announcement.stable_routing_id)):
            if name is not None:
                self._on_present(name, replica.dp_rank, announcement.generation)


def _decisive(announced: ReplicaAnnouncement) -> tuple[object, ...]:
    """The parts of an announcement that views and profiles depend on."""
    return announced.namespace, announced.model, announced.materialization


def wire_id(stable_routing_id: str) -> int | None:
    """`stable_worker_id`, or None for an id that our own wire types cannot carry (the worker is then reachable by
    instance only)."""
    try:
        return stable_worker_id(check_stable_routing_id(stable_routing_id))
    except ContractError:
        return None
