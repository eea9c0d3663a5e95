"""ConnectorMetadata: the leader's orders to every rank for one iteration. Plain picklable data: TensorRT-LLM broadcasts
it."""

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
    """Fill pages that a request owns from host slots. `plan` says for which request, from which donor and cache
    generation (RFC "build_connector_meta")."""

    key: PlanKey
    moves: tuple[Move, ...]
    plan: SemanticTrtLoadPlan


@dataclass(frozen=True)
class SaveOrder:
    """Copy pages of a request to host slots once the forward pass of this iteration has run."""

    save_id: int
    moves: tuple[Move, ...]
    request_id: int


class Unloadable(NamedTuple):
    """An offer that the engine relies on in this batch and that cannot be kept. `request_id` None: it belongs to no
    single request, so none can be taken out of the batch."""

    request_id: int | None
    why: str
    async_load: bool = False
    """The request waits in the engine for an asynchronous load: it is not in this batch, and `get_finished` must name
    it."""


@dataclass
class Orders:
    """One iteration's orders while the leader collects them; the fields mean what they do in `ConnectorMetadata`."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    unloadable: list[Unloadable] = field(default_factory=list)
    async_loads: list[LoadOrder] = field(default_factory=list)
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
    """Ranks must fail the forward pass, or have these requests taken out of it, rather than let it run on unwritten
    pages."""
    async_loads: tuple[LoadOrder, ...] = ()
    """Asynchronous loads whose requests have just begun to wait in the engine: a rank starts them now, and
    `get_finished` names the request when its load is over."""
    nothing_to_load: tuple[int, ...] = ()
    """Requests that wait in the engine although it took nothing of their offers: `get_finished` names them at once."""
    abandoned: tuple[PlanKey, ...] = ()
    """Asynchronous loads whose pages the engine has given to another request: no byte may be written for them from this
    forward pass on."""
    disk: tuple[DiskOrder, ...] = ()
    """Orders to the disk stores where ranks are processes of their own; a single rank gets them by a call."""
    endpoint: Endpoint | None = None
    """Where ranks of other processes reach the leader; None where there are none."""
    idle: bool = False
    """Nothing is ordered, and the forward pass of this iteration confirms no attempt: ranks need not report its end."""
