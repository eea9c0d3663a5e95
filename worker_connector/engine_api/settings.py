"""Settings of one connector, and what it refuses at bring-up.

TensorRT-LLM has no place for a connector's own options (`KvCacheConnectorConfig` is strict), so they come from the file
that `SEMKV_CONFIG` names, with `SEMKV_*` overrides; `DYN_STABLE_ROUTING_ID`, which Dynamo publishes on the worker's
model card, says which engine this is. What cannot be served correctly is refused before the first request, with the
setting and the remedy in the message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.bus.access_files import unusable
from dynamo_semkv.config.evidence import EvidenceConfig
from dynamo_semkv.config.files import missing_everywhere
from dynamo_semkv.config.host_memory import Available, total_memory
from dynamo_semkv.config.load import load_config, read_fetch_secret, read_salt_key
from dynamo_semkv.config.schema import BusConfig, ConnectorConfig, Materialization, require_request_local_kv
from dynamo_semkv.contracts.errors import ContractError, ContractErrors
from dynamo_semkv.contracts.identity import check_stable_routing_id
from dynamo_semkv.contracts.namespace import DEFAULT_SALT_KEY
from worker_connector.engine_api.engine import KvCacheConnectorScheduler as engine_scheduler
from worker_connector.engine_api.world import world_of
from worker_connector.errors import Refused
from worker_connector.restatement import RESTATES_PER_TTL, restate_every

_log = logging.getLogger(__name__)

CONFIG_VARIABLE = "SEMKV_CONFIG"
IDENTITY_VARIABLE = "DYN_STABLE_ROUTING_ID"
_TURN_OFF = "or set connector.materialization: off"


@dataclass(frozen=True)
class Settings:
    """All that one connector is configured with, from the file, the environment and their defaults."""

    connector: ConnectorConfig
    bus: BusConfig
    model: str | None
    """`model.name`: what the engine is called by clients, if the file says it."""
    salt_key: bytes
    stable_routing_id: str
    config_hash: str
    told: str = ""
    """Describes the configuration in words, for the log."""
    otlp_endpoint: str | None = None
    """`observe.otlp_endpoint`."""
    fetch_secret: bytes | None = None
    """Of `connector.fetch.secret_file`; None: nothing is pulled or served."""
    max_donor_age: float = EvidenceConfig().max_donor_age
    """`evidence.max_donor_age`: seconds for which routers believe a donor that is not registered again."""

    @property
    def exact(self) -> bool:
        """True where blocks are saved and loaded: `connector.materialization` is `exact`."""
        return self.connector.materialization is Materialization.EXACT

    @property
    def restate_seconds(self) -> float:
        """Seconds between two routine registrations of all donors, which begin with an announcement."""
        every = restate_every(self.bus.stream_max_age_seconds, self.max_donor_age)
        return max(every, self.connector.announce_interval_seconds)

    @property
    def donor_ttl(self) -> float:
        """Seconds for which a registration holds unless it is repeated."""
        return self.restate_seconds * RESTATES_PER_TTL


def tell_settings(who: str, settings: Settings) -> None:
    """Logs the configuration at the start of a leader or rank; as a warning where nobody has configured logging, as in
    the process of TensorRT-LLM's executor, since Python writes nothing below that there."""
    level = logging.INFO if _log.hasHandlers() else logging.WARNING
    _log.log(level, "semkv connector: %s of %s runs %s", who, settings.stable_routing_id, settings.told)


def load_settings(llm_args: Any, env: Mapping[str, str]) -> Settings:
    """Raises ContractError for a bad file, Refused for what the file or the engine may not ask of this connector."""
    loaded = load_config(env.get(CONFIG_VARIABLE), env)
    config = loaded.config
    for warning in loaded.warnings:
        _log.warning("semkv connector: %s", warning)
    unusable_files = [*missing_everywhere(config)] or [*unusable(config.bus)]
    if unusable_files:
        raise ContractErrors.of(unusable_files)
    require_request_local_kv(config, advertised=bool(getattr(llm_args, "request_local_kv", False)))
    if config.connector.materialization is Materialization.EXPERIMENTAL:
        raise Refused(
            "connector.materialization",
            "experimental",
            "this build has no materialization of approximate KV",
            "set it to off or exact",
        )
    stable = env.get(IDENTITY_VARIABLE, "")
    try:
        check_stable_routing_id(stable)
    except ContractError as error:
        raise Refused(
            IDENTITY_VARIABLE,
            stable,
            "without it no router can tell whose donors, reports and announcements these are",
            f"set it, in the environment of the engine, to a name of this process: {error.allowed}",
        ) from error
    settings = Settings(
        connector=config.connector,
        bus=config.bus,
        model=config.model.name,
        salt_key=read_salt_key(config.security.salt_key_file, DEFAULT_SALT_KEY),
        stable_routing_id=stable,
        config_hash=loaded.hash,
        told=loaded.told,
        otlp_endpoint=config.observe.otlp_endpoint,
        fetch_secret=_fetch_secret(config.connector),
        max_donor_age=config.evidence.max_donor_age,
    )
    if settings.exact:
        refuse_unsupported(llm_args)
        _refuse_slabs_beyond(total_memory(), settings.connector.slab_bytes, llm_args)
        _refuse_under_tensor_parallelism(settings, llm_args)
    return settings


def _refuse_under_tensor_parallelism(settings: Settings, llm_args: Any) -> None:
    if world_of(llm_args) == 1:
        return
    _refuse_if(
        settings.connector.async_load_min_tokens is not None,
        "connector.async_load_min_tokens",
        settings.connector.async_load_min_tokens,
        "under tensor parallelism the engine may free a parked request's pages on one rank while another still fills "
        "them",
        "set it to null",
    )
    _refuse_if(
        settings.fetch_secret is not None,
        "connector.fetch.enabled",
        True,
        "under tensor parallelism a block is spread over the slabs of several ranks, which would have to pull their "
        "shards in step",
        "set it to false",
    )


def _fetch_secret(config: ConnectorConfig) -> bytes | None:
    if not config.fetch.enabled or config.fetch.secret_file is None:
        return None
    return read_fetch_secret(config.fetch.secret_file)


def refuse_unsupported(llm_args: Any) -> None:
    """Raises Refused for engine settings under which page slots may change hands unreported, or a block is spread over
    ranks in another way than by heads (KV Cache Connector doc, "A page slot must not be reassigned underneath the
    connector")."""
    cache = getattr(llm_args, "kv_cache_config", None)
    _refuse_if(
        getattr(llm_args, "speculative_config", None) is not None,
        "speculative_config",
        type(getattr(llm_args, "speculative_config", None)).__name__,
        "rejected draft tokens take pages away from a request without telling the connector",
        "serve without speculative decoding",
    )
    for name in ("host_cache_size", "disk_cache_size"):
        size = getattr(cache, name, None) or 0
        _refuse_if(
            size > 0,
            f"kv_cache_config.{name}",
            size,
            "a cache tier below the GPU reassigns page slots underneath the connector",
            "set it to 0 and give connector.slab_bytes the memory",
        )
    _refuse_if(
        getattr(cache, "enable_block_reuse", True) is False,
        "kv_cache_config.enable_block_reuse",
        False,
        "without block reuse the runtime never honours what a connector offers",
        "set it to true",
    )
    _refuse_parallelism(llm_args)
    policy = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", None)
    name = str(getattr(policy, "value", policy) or "GUARANTEED_NO_EVICT")
    _refuse_if(
        not name.endswith("GUARANTEED_NO_EVICT"),
        "scheduler_config.capacity_scheduler_policy",
        name,
        "a request that is evicted and replayed comes back on other pages",
        "set it to GUARANTEED_NO_EVICT",
    )
    if getattr(cache, "enable_partial_reuse", False):
        _log.warning(
            "semkv connector: kv_cache_config.enable_partial_reuse is on; prompts of which the engine holds part of a "
            "block are not loaded. Set it to false."
        )


def _refuse_slabs_beyond(memory: Available | None, slab_bytes: int, llm_args: Any) -> None:
    """Ranks start at the same time, so each finds the memory free that the others are about to take (memory/slab.py
    asks for its own)."""
    parallel = getattr(llm_args, "tensor_parallel_size", None) or 1
    ranks = min(parallel, getattr(llm_args, "gpus_per_node", None) or parallel)
    if memory is not None and ranks > 1:
        _refuse_if(
            ranks * slab_bytes > memory.size,
            "connector.slab_bytes",
            slab_bytes,
            f"it counts for each of {ranks} ranks here, and all of them may have {memory.size} bytes: {memory.bound}",
            f"set it to less than {memory.size // ranks}, give the container more memory",
        )


def _refuse_parallelism(llm_args: Any) -> None:
    for name, why in (
        ("max_beam_width", "blocks of several beams cannot be told apart"),
        ("pipeline_parallel_size", "each stage holds other layers of a block"),
        ("context_parallel_size", "each rank holds other tokens of a block"),
    ):
        value = getattr(llm_args, name, None) or 1
        _refuse_if(value > 1, name, value, why, "set it to 1")
    world = world_of(llm_args)
    local = getattr(llm_args, "gpus_per_node", None) or world
    _refuse_if(
        world > local,
        "tensor_parallel_size",
        world,
        f"with {local} GPUs a machine the ranks are on several, and the leader's results come over a socket of one",
        "set it to at most that, use attention data parallelism,",
    )
    _refuse_if(
        bool(getattr(llm_args, "enable_attention_dp", False))
        and not hasattr(engine_scheduler, "supports_attention_dp"),
        "enable_attention_dp",
        True,
        "this TensorRT-LLM has one connector scheduler for all ranks, which does not know what the others serve",
        "take a version with NVIDIA/TensorRT-LLM#19250, set it to false",
    )


def _refuse_if(refused: bool, setting: str, value: object, why: str, remedy: str) -> None:
    if refused:
        raise Refused(
            setting, value, why, f"{remedy}, {_TURN_OFF}" if not remedy.endswith(",") else f"{remedy} {_TURN_OFF}"
        )


def check_tokens_per_block(llm_args: Any, registered: int) -> None:
    """Raises Refused when the engine's settings and its pool disagree (NVIDIA/TensorRT-LLM#13320: an attention backend
    may change it)."""
    configured = getattr(getattr(llm_args, "kv_cache_config", None), "tokens_per_block", None)
    if configured is not None and configured != registered:
        raise Refused(
            "kv_cache_config.tokens_per_block",
            configured,
            f"the registered KV cache has {registered} tokens in a block",
            f"set it to {registered}",
        )


def configured_tokens_per_block(llm_args: Any) -> int:
    """Tokens per block from the settings, for a pool that is registered as a bare tensor, which does not say it. Raises
    Refused where they are not set."""
    configured = getattr(getattr(llm_args, "kv_cache_config", None), "tokens_per_block", None)
    if not isinstance(configured, int) or configured < 1:
        raise Refused(
            "kv_cache_config.tokens_per_block",
            configured,
            "the KV cache is registered as one tensor, which does not say how many tokens a block has",
            "set it",
        )
    return configured
