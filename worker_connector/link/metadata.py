"""ConnectorMetadata: what one iteration's leader tells every rank. Plain picklable data: TensorRT-LLM broadcasts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dynamo_semkv.contracts.load_plan import SemanticTrtLoadPlan
from worker_connector.disk.messages import DiskOrder
from worker_connector.ledger.plan import PlanKey
from worker_connector.link.wire import Endpoint
from worker_connector.memory.transfer import Move


@dataclass(frozen=True)
class LoadOrder:
    """Fill recipient-owned pages from host slots. `plan` says for whom, from which donor and cache generation (RFC
    "build_connector_meta")."""

    key: PlanKey
    moves: tuple[Move, ...]
    plan: SemanticTrtLoadPlan


@dataclass(frozen=True)
class SaveOrder:
    """Copy pages to host slots once the forward pass of this iteration has run."""

    save_id: int
    moves: tuple[Move, ...]
    request_id: int


class Unloadable(NamedTuple):
    """A promise of this batch that cannot be kept. `request_id` None: it belongs to no single request, so none can be
    taken out of the batch."""

    request_id: int | None
    why: str
    parked: bool = False
    """The request waits in the engine for an asynchronous load of ours: it is not in this batch, and its load must be
    answered."""


@dataclass
class Orders:
    """One iteration's instructions, as the leader's books collect them."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    unloadable: list[Unloadable] = field(default_factory=list)
    parked_loads: list[LoadOrder] = field(default_factory=list)
    nothing_to_load: list[int] = field(default_factory=list)
    abandoned: list[PlanKey] = field(default_factory=list)


class ConnectorMetadata(msgspec.Struct, frozen=True):
    """One iteration's orders to every rank, and how ranks reach the leader that made them."""

    channel_id: int
    generation: str
    iteration: int
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    unloadable: tuple[Unloadable, ...] = ()
    """Ranks must fail the forward pass, or have these requests taken out of it, rather than run it on unwritten
    pages."""
    parked_loads: tuple[LoadOrder, ...] = ()
    """Asynchronous loads, for which the engine has just begun to let requests wait: started now, awaited by
    `get_finished`."""
    nothing_to_load: tuple[int, ...] = ()
    """Requests that wait in the engine although it honours nothing of their offers: they are released at once."""
    abandoned: tuple[PlanKey, ...] = ()
    """Asynchronous loads whose pages the engine has given to another request: no byte may be written for them from this
    forward pass on."""
    disk: tuple[DiskOrder, ...] = ()
    """For the disk stores of ranks in several processes; a rank alone gets its orders at once."""
    endpoint: Endpoint | None = None
    """Where ranks of other processes reach the leader; None where there are none."""
    idle: bool = False
    """Nothing is ordered, and no attempt is confirmed by the forward pass of this iteration: its end need not be
    reported."""
