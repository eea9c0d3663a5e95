"""Puts the parts of one rank together, for the rank's own thread (`engine/rank.py`) and for a stepped rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker_connector.reference_engine.engine.behaviours import Dice
from worker_connector.reference_engine.engine.config import ConnectorSpec, EngineConfig, build_llm_args
from worker_connector.reference_engine.engine.connector_manager import ConnectorManager, bring_up
from worker_connector.reference_engine.engine.events import KvEventBuffer
from worker_connector.reference_engine.engine.executor import Executor, Probe
from worker_connector.reference_engine.engine.fair_lock import FairLock
from worker_connector.reference_engine.engine.forward_pass import Device, warm_up
from worker_connector.reference_engine.models.kv_pool import KvPool
from worker_connector.reference_engine.models.layer_groups import layer_groups
from worker_connector.reference_engine.models.presets import LoadedModel
from worker_connector.reference_engine.timing.pass_timer import PassTimer


class RankParts(NamedTuple):
    """The parts of one rank; `connector` is None without one."""

    pool: KvPool
    events: KvEventBuffer
    connector: ConnectorManager | None
    executor: Executor


def assemble_rank(
    rank: int,
    config: EngineConfig,
    model: LoadedModel,
    connector: ConnectorSpec | None,
    forward_lock: FairLock,
    probe: Probe | None = None,
    dice: Dice | None = None,
) -> RankParts:
    """Make pool, connector and executor of one rank. What a connector raises at bring-up passes through."""
    longest = config.resolved_max_seq_len(model.config)
    pool = KvPool(
        model.config,
        config.num_blocks,
        config.tokens_per_block,
        poison=config.poison_pages,
        device=torch.device(config.device),
        groups=layer_groups(model.config.num_layers, config.max_attention_window, config.sink_token_length, longest),
    )
    windows = [pages.group.window or longest for pages in pool.groups]
    events = KvEventBuffer(rank, windows, config.event_buffer_max_size)
    for _ in range(config.behaviours.warmup_forwards):
        warm_up(model.model, pool, min(config.max_num_tokens, longest))
    timer = PassTimer(config.gpu) if config.gpu is not None else None
    manager = None
    if connector is not None:
        manager = bring_up(connector, build_llm_args(config, model, connector, rank), pool, config, timer)
    executor = Executor(rank, config, Device(model.model, pool, forward_lock, timer), events, manager, probe, dice)
    return RankParts(pool, events, manager, executor)
