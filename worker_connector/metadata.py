"""ConnectorMetadata: what one iteration's leader tells every rank. Plain picklable data: TensorRT-LLM broadcasts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynamo_semkv.contracts.load_plan import SemanticTrtLoadPlan
from worker_connector.plan import PlanKey
from worker_connector.transfer import Move


@dataclass(frozen=True)
class LoadOrder:
    """Fill recipient-owned pages from host slots. `plan` says for whom, from which donor and cache life (RFC "build_connector_meta")."""

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
    """A promise of this batch that cannot be kept. `request_id` None: it is not one request's, so no request can be taken out."""

    request_id: int | None
    why: str


@dataclass(frozen=True)
class ConnectorMetadata:
    channel_id: int
    generation: str
    iteration: int
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    unloadable: tuple[Unloadable, ...] = ()
    """Ranks must fail the forward pass, or have these requests taken out of it, rather than run it on unwritten pages."""
