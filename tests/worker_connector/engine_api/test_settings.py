"""Bring-up: the file, the environment, and what is refused with which remedy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_semkv.config.host_memory import Available
from dynamo_semkv.contracts.errors import ContractError
from tests.worker_connector.scripted import llm_args
from worker_connector.engine_api.settings import check_tokens_per_block, configured_tokens_per_block, load_settings
from worker_connector.engine_api.world import rank_of
from worker_connector.errors import Refused

ENV = {"DYN_STABLE_ROUTING_ID": "engine-a"}


def cache(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"tokens_per_block": 32, "dtype": "auto", "enable_block_reuse": True} | changes)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text("connector: {slab_bytes: 2097152}\nmodel: {name: served}\n")
    env = ENV | {"SEMKV_CONFIG": str(file), "SEMKV_CONNECTOR__MIN_OFFER_TOKENS": "64"}
    found = load_settings(llm_args(32), env)
    assert found.exact
    assert (found.connector.slab_bytes, found.connector.min_offer_tokens) == (2 * 1024 * 1024, 64)
    assert (found.model, found.stable_routing_id) == ("served", "engine-a")
    assert load_settings(llm_args(32), ENV).model is None


def test_bad_file_names_the_key(tmp_path: Path) -> None:
    file = tmp_path / "semkv.yaml"
    file.write_text("connector: {slab_byte: 1}\n")
    with pytest.raises(ContractError, match=r"connector\.slab_byte"):
        load_settings(llm_args(32), ENV | {"SEMKV_CONFIG": str(file)})


@pytest.mark.parametrize("value", [None, "", "has blanks", "star*"])
def test_engine_without_a_name_is_refused(value: str | None) -> None:
    env = {} if value is None else {"DYN_STABLE_ROUTING_ID": value}
    with pytest.raises(Refused, match=r"DYN_STABLE_ROUTING_ID.*Remedy: set it"):
        load_settings(llm_args(32), env)


def test_experimental_is_refused_with_its_reason() -> None:
    env = ENV | {"SEMKV_CONNECTOR__MATERIALIZATION": "experimental"}
    with pytest.raises(ContractError, match="request-local KV"):
        load_settings(llm_args(32), env)
    with pytest.raises(Refused, match="no materialization of approximate KV"):
        load_settings(llm_args(32, request_local_kv=True), env)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"speculative_config": SimpleNamespace()}, "speculative_config"),
        ({"kv_cache_config": cache(host_cache_size=1)}, "kv_cache_config.host_cache_size"),
        ({"kv_cache_config": cache(disk_cache_size=1)}, "kv_cache_config.disk_cache_size"),
        ({"kv_cache_config": cache(enable_block_reuse=False)}, "kv_cache_config.enable_block_reuse"),
        ({"max_beam_width": 2}, "max_beam_width"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"tensor_parallel_size": 8, "gpus_per_node": 4}, "tensor_parallel_size"),
        (
            {"scheduler_config": SimpleNamespace(capacity_scheduler_policy=SimpleNamespace(value="MAX_UTILIZATION"))},
            "scheduler_config.capacity_scheduler_policy",
        ),
    ],
)
def test_what_cannot_be_served_correctly_is_refused_with_a_remedy(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(Refused, match="Remedy: ") as refused:
        load_settings(llm_args(32, **changes), ENV)
    assert refused.value.setting == setting
    assert "connector.materialization: off" in str(refused.value)
    off = ENV | {"SEMKV_CONNECTOR__MATERIALIZATION": "off"}
    assert not load_settings(llm_args(32, **changes), off).exact  # nothing is moved, so nothing can be moved wrongly


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 4, "enable_attention_dp": True},
        {"tensor_parallel_size": 16, "gpus_per_node": 8, "enable_attention_dp": True},
        {"tensor_parallel_size": 4, "gpus_per_node": 8},
        {"tensor_parallel_size": 2, "gpus_per_node": None},
        {"kv_cache_config": cache(host_cache_size=0, disk_cache_size=None)},
        {"scheduler_config": SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT")},
        {"scheduler_config": None},
        {"max_beam_width": None},
    ],
)
def test_what_can_be_served_is_not_refused(changes: dict[str, Any]) -> None:
    assert load_settings(llm_args(32, **changes), ENV).exact


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"tensor_parallel_size": 4}, True),
        ({"tensor_parallel_size": 4, "enable_attention_dp": True}, True),
        ({"tensor_parallel_size": 16, "gpus_per_node": 2, "enable_attention_dp": True}, False),
        ({"tensor_parallel_size": 2}, False),
        ({}, False),
    ],
)
def test_slabs_of_all_ranks_together_fit_into_the_container(
    changes: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Available(24 * 2**30, "memory.max of /sys/fs/cgroup")
    monkeypatch.setattr("worker_connector.engine_api.settings.total_memory", lambda: memory)
    env = ENV | {"SEMKV_CONNECTOR__SLAB_BYTES": str(8 * 2**30)}
    if not refused:
        assert load_settings(llm_args(32, **changes), env).exact
        return
    with pytest.raises(Refused, match=r"each of 4 ranks here.*memory.max of /sys/fs/cgroup.*less than 6442450944"):
        load_settings(llm_args(32, **changes), env)


def test_attention_dp_is_refused_on_a_tensorrt_llm_that_has_one_scheduler_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "worker_connector.engine_api.settings.engine_scheduler", type("KvCacheConnectorScheduler", (), {})
    )
    with pytest.raises(Refused, match=r"NVIDIA/TensorRT-LLM#19250") as refused:
        load_settings(llm_args(32, tensor_parallel_size=4, enable_attention_dp=True), ENV)
    assert refused.value.setting == "enable_attention_dp"
    assert load_settings(llm_args(32, tensor_parallel_size=4), ENV).exact


def test_asynchronous_loads_are_refused_under_tensor_parallelism() -> None:
    env = ENV | {"SEMKV_CONNECTOR__ASYNC_LOAD_MIN_TOKENS": "4096"}
    with pytest.raises(Refused, match="Remedy: set it to null") as refused:
        load_settings(llm_args(32, tensor_parallel_size=2), env)
    assert refused.value.setting == "connector.async_load_min_tokens"
    assert load_settings(llm_args(32, tensor_parallel_size=2, enable_attention_dp=True), env).exact


def test_fetching_is_refused_under_tensor_parallelism_and_wants_a_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    env = ENV | {"SEMKV_CONNECTOR__FETCH__ENABLED": "true", "SEMKV_CONNECTOR__FETCH__SECRET_FILE": str(secret)}
    secret.write_bytes(b"sixteen bytes ok\n")
    assert load_settings(llm_args(32), env).fetch_secret == b"sixteen bytes ok"
    assert load_settings(llm_args(32), ENV).fetch_secret is None
    assert load_settings(llm_args(32, tensor_parallel_size=2, enable_attention_dp=True), env).fetch_secret
    with pytest.raises(Refused, match="Remedy: set it to false") as refused:
        load_settings(llm_args(32, tensor_parallel_size=2), env)
    assert refused.value.setting == "connector.fetch.enabled"
    secret.write_bytes(b"too short")
    with pytest.raises(ContractError, match=r"connector\.fetch\.secret_file.*16 to 1024") as short:
        load_settings(llm_args(32), env)
    assert "too short" not in str(short.value)


def test_rank_is_read_from_the_launcher_and_refused_when_unknown() -> None:
    args = llm_args(32, tensor_parallel_size=4)
    assert rank_of(args, {"OMPI_COMM_WORLD_RANK": "3", "RANK": "1"}) == 3
    assert rank_of(args, {"SLURM_PROCID": "2"}) == 2
    for env in ({}, {"RANK": "4"}, {"RANK": "-1"}, {"RANK": "first"}):
        with pytest.raises(Refused, match="which of the 4 ranks"):
            rank_of(args, env)
    assert rank_of(llm_args(32), {}) == 0
    assert rank_of(llm_args(32, enable_attention_dp=True, attention_dp_rank=2, tensor_parallel_size=4), {}) == 2


def test_partial_reuse_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    load_settings(llm_args(32, kv_cache_config=cache(enable_partial_reuse=True)), ENV)
    assert "enable_partial_reuse" in caplog.text


def test_trtllm_13320_settings_and_pool_must_agree_on_the_block() -> None:
    """NVIDIA/TensorRT-LLM#13320: an attention backend sets 64 tokens a block where the settings say 32."""
    check_tokens_per_block(llm_args(64), 64)
    with pytest.raises(Refused, match=r"tokens_per_block = 32: the registered KV cache has 64.*set it to 64"):
        check_tokens_per_block(llm_args(32), 64)


@pytest.mark.parametrize("value", [None, 0, "32"])
def test_bare_tensor_needs_the_block_size_from_the_settings(value: Any) -> None:
    assert configured_tokens_per_block(llm_args(32)) == 32
    with pytest.raises(Refused, match="tokens_per_block"):
        configured_tokens_per_block(llm_args(value))


def test_disk_is_off_by_default_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{}")
    found = load_settings(llm_args(32), ENV | {"SEMKV_CONFIG": str(file)}).connector
    assert (found.disk_path, found.disk_bytes) == (None, 16 * 1024**3)
    file.write_text("connector: {disk_path: /somewhere, disk_bytes: 1048576}")
    found = load_settings(llm_args(32), ENV | {"SEMKV_CONFIG": str(file)}).connector
    assert (found.disk_path, found.disk_bytes) == ("/somewhere", 1048576)
    file.write_text("connector: {disk_bytes: 5}")
    with pytest.raises(ContractError, match=r"connector.disk_bytes.*1048576"):
        load_settings(llm_args(32), ENV | {"SEMKV_CONFIG": str(file)})
