"""SemkvConnectorWorker: TensorRT-LLM's worker callbacks, each of which delegates to the rank.

All work is done in `start_load_kv` and `wait_for_save`; nothing depends on the layer hooks, since CUDA graphs skip them
(ai-dynamo/dynamo#3297): see rank/layer_hooks.py. The engine never waits for saves: `get_finished` names only requests
that wait for an asynchronous load."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch

from worker_connector.assembly import assemble_rank
from worker_connector.engine_api.engine import KvCacheConnectorWorker, KvCacheLayout
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.engine_api.settings import check_tokens_per_block, configured_tokens_per_block
from worker_connector.link.channel import channel_by_id
from worker_connector.link.metadata import ConnectorMetadata
from worker_connector.rank.rank import Rank


class SemkvConnectorWorker(KvCacheConnectorWorker):
    """One rank's side of the connector; see the module."""

    supports_attention_dp = True  # transfers and their completion are the owner rank's alone

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._rank = self._assemble(llm_args)

    def _assemble(self, llm_args: Any) -> Rank:
        return assemble_rank(llm_args, os.environ)

    @property
    def rank(self) -> Rank:
        """What all callbacks delegate to."""
        return self._rank

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Takes tokens per block from the settings, since a bare tensor does not say it. Raises Refused."""
        geometry = PoolGeometry.from_tensor(kv_cache_tensor, configured_tokens_per_block(self._llm_args))
        self._rank.register(geometry, keeps_pages=False)

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Raises Refused for a layout that cannot be served, or that disagrees with the settings."""
        geometry = PoolGeometry.from_layout(layout)
        check_tokens_per_block(self._llm_args, geometry.tokens_per_block)
        self._rank.register(geometry)

    def bind_connector_meta(self, metadata: object) -> None:
        """Also moves the rank to the leader that made this metadata, where it has another or none."""
        super().bind_connector_meta(metadata)
        if isinstance(metadata, ConnectorMetadata):
            self._rank.meet(metadata, channel_by_id)

    def start_load_kv(self, stream: Any) -> None:
        """Raises LoadFailed, and only that: see `rank/rank.py`."""
        metadata = self.get_connector_meta()
        self._rank.start_load(metadata if isinstance(metadata, ConnectorMetadata) else None, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing unless the rank watches the layer hooks."""
        rank = self._rank
        if rank.hooks.watching:
            rank.before_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: `wait_for_save` saves all layers."""
        return None

    def wait_for_save(self, stream: Any) -> None:
        """Starts the saves of this iteration behind its forward pass; does not wait for them to land."""
        metadata = self.get_connector_meta()
        self._rank.forward_done(metadata if isinstance(metadata, ConnectorMetadata) else None, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Names requests whose asynchronous loads are done. Raises LoadFailed for one that cannot be done, where
        `take_failed_async_load_requests` is not called."""
        rank = self._rank
        if not started_loading_req_ids and rank.at_rest():
            return [], []
        rank.iteration_over()
        return [], rank.finished_loads(started_loading_req_ids)

    def take_failed_load_requests(self) -> set[int]:
        """Optional hook: requests of the last `start_load_kv` that must leave the batch. Always empty where the runtime
        does not call it; there `start_load_kv` raises."""
        return self._rank.take_failed()

    def take_failed_async_load_requests(self) -> set[int]:
        """Optional hook: requests that `get_finished` named as loaded although their load failed. Always empty where
        the runtime does not call it."""
        return self._rank.take_failed_parked()

    def drop_bound_saves(self, request_ids: Collection[int]) -> None:
        """Optional hook: these requests leave the coming forward pass."""
        self._rank.drop_saves_of(request_ids)

    def shutdown(self) -> None:
        """Optional hook of the engine. Idempotent."""
        self._rank.shut()
