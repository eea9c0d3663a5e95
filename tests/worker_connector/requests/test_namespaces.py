"""The engine's namespace, the request's, and the reading of requests."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.namespace import CacheNamespace, first_difference, tenant_scope
from dynamo_semkv.contracts.report import Reason
from tests.worker_connector.scripted import llm_args
from worker_connector.engine_api.request_view import (
    RequestScope,
    is_dummy,
    pack_tokens,
    request_tokens,
    scope_of,
    served_position,
    unpack_tokens,
    unsupported,
)
from worker_connector.link.channel import RankReady
from worker_connector.requests.engine_namespace import (
    RequestNamespaces,
    adapters_of,
    engine_namespace,
    served_model_name,
)

KEY = b"a key of the deployment"
OPEN = RequestScope(None, True, None, ())


def pool(**changes: Any) -> RankReady:
    options: dict[str, Any] = {
        "rank": 0,
        "tokens_per_block": 32,
        "group_ids": (0,),
        "windows": (None,),
        "bytes_per_block": 64_000,
        "kv_dtype": "float16",
        "kv_layout": "f" * 16,
        "slots": 5,
    }
    return RankReady(**options | changes)


def of_engine(args: Any = None, **changes: Any) -> CacheNamespace:
    return engine_namespace(args or llm_args(32), pool(**changes), None)


def test_engine_knows_all_fields_that_are_not_the_request_s() -> None:
    found = of_engine()
    assert set(found.unknown_fields()) == {"tenant", "lora", "lora_revision", "multimodal"}
    assert found.for_request(tenant="").unknown_fields() == ()


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (of_engine(llm_args(32, model="other")), "model"),
        (of_engine(llm_args(32, revision="2")), "model"),
        (of_engine(llm_args(32, quant_config=SimpleNamespace(quant_algo="FP8"))), "model"),
        (of_engine(llm_args(32, tokenizer="other")), "tokenizer"),
        (of_engine(llm_args(32, backend="autodeploy")), "backend_mode"),
        (of_engine(tokens_per_block=64), "tokens_per_block"),
        (of_engine(kv_dtype="float8_e4m3fn"), "kv_dtype"),
        (of_engine(kv_layout="e" * 16), "kv_layout"),
        (of_engine(windows=(1024,)), "attention_window"),
        (of_engine(bytes_per_block=32_000), "attention_shape"),
        (of_engine(llm_args(32, tensor_parallel_size=2)), "parallelism"),
    ],
)
def test_each_setting_has_its_field(other: CacheNamespace, field: str) -> None:
    assert first_difference(of_engine().for_request(tenant=""), other.for_request(tenant="")) == field


def test_speculative_decoding_is_unknown() -> None:
    assert "speculative" in of_engine(llm_args(32, speculative_config=object())).unknown_fields()


def test_attention_data_parallel_ranks_share_one_namespace() -> None:
    sizes = [of_engine(llm_args(32, enable_attention_dp=True, tensor_parallel_size=n)).digest() for n in (1, 2, 8)]
    assert len(set(sizes)) == 1


def test_windows_as_long_as_the_sequence_are_full_attention() -> None:
    cache = SimpleNamespace(tokens_per_block=32, dtype="auto", max_attention_window=[4096])
    assert of_engine(llm_args(32, kv_cache_config=cache, max_seq_len=4096)).attention_window == "full"
    assert of_engine(llm_args(32, kv_cache_config=cache, max_seq_len=8192)).attention_window == "4096"
    assert of_engine(windows=(None, 512)).attention_window == "full,512"


def test_head_counts_come_from_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9, "num_key_value_heads": 3}))
    assert of_engine(llm_args(32, model=str(tmp_path))).attention_shape == "9/3;2000B/token"
    (tmp_path / "config.json").write_text("[not a mapping")
    assert of_engine(llm_args(32, model=str(tmp_path))).attention_shape == "heads-by-model;2000B/token"


def test_served_name() -> None:
    assert served_model_name(llm_args(32), "configured") == "configured"
    assert served_model_name(llm_args(32, served_model_name="served"), None) == "served"
    assert served_model_name(llm_args(32), None) == "scripted"
    assert served_model_name(SimpleNamespace(), None) == "unknown"


@pytest.fixture
def namespaces() -> RequestNamespaces:
    return RequestNamespaces(of_engine(), {1: "one", 2: "two"}, KEY)


@pytest.mark.parametrize(
    "scope",
    [
        RequestScope("salt", True, None, ()),
        RequestScope("other salt", True, None, ()),
        RequestScope(None, True, 1, ()),
        RequestScope(None, True, 2, ()),
        RequestScope(None, True, None, ("ab" * 32,)),
        RequestScope("salt", True, 1, ()),
    ],
)
def test_vllm_44250_salt_adapter_and_media_are_in_every_key(namespaces: RequestNamespaces, scope: RequestScope) -> None:
    """vllm-project/vllm#44250, LMCache#4086: KV of one adapter, tenant or image must not serve another."""
    namespace, digest, problem = namespaces.of(scope)
    assert problem is None
    assert digest == namespace.digest()
    others = [OPEN, RequestScope("third", True, None, ()), RequestScope(None, True, None, ("cd" * 32,))]
    assert digest not in {namespaces.of(other)[1] for other in others}
    assert digest != namespaces.open_digest


def test_router_computes_the_same_digest(namespaces: RequestNamespaces) -> None:
    """The router adds the request to the announced namespace; both must come to the same keys."""
    announced = of_engine()
    assert namespaces.of(OPEN)[1] == announced.for_request(tenant=tenant_scope(None, KEY)).digest()
    assert (
        namespaces.of(RequestScope("s", True, 2, ("ab",)))[1]
        == announced.for_request(
            tenant=tenant_scope("s", KEY), lora="2", lora_revision="two", multimodal=("ab",)
        ).digest()
    )


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        (RequestScope(None, False, None, ()), Reason.SALT_UNKNOWN),
        (RequestScope("", True, None, ()), Reason.SALT_UNKNOWN),
        (RequestScope(None, True, 7, ()), Reason.ADAPTER_UNKNOWN),
        (RequestScope(None, True, None, None), Reason.MULTIMODAL_UNHASHED),
    ],
)
def test_unknown_is_never_materialized(namespaces: RequestNamespaces, scope: RequestScope, reason: Reason) -> None:
    namespace, _, problem = namespaces.of(scope)
    assert problem is reason
    assert namespace.unknown_fields()


def test_namespace_that_is_not_wholly_known_is_never_materialized() -> None:
    found = RequestNamespaces(CacheNamespace(model="m"), {}, KEY).of(OPEN)
    assert found[2] is Reason.NAMESPACE_UNKNOWN


def test_scopes_are_remembered_within_bounds(namespaces: RequestNamespaces) -> None:
    first = namespaces.of(OPEN)
    for number in range(5_000):
        namespaces.of(RequestScope(f"salt {number}", True, None, ()))
    assert len(namespaces._known) == 4_096
    assert namespaces.of(OPEN) == first


def test_adapters_of_an_engine_that_knows_none() -> None:
    assert adapters_of(SimpleNamespace()) == {}
    assert adapters_of(llm_args(32)) == {1: "one", 2: "two"}


# reading requests


@pytest.mark.parametrize("tokens", [[1, 2, 2**32 - 1], array("I", [1, 2]), np.array([1, 2], np.int32), (3, 4), []])
def test_tokens_are_packed_as_little_endian_words(tokens: Any) -> None:
    raw = pack_tokens(tokens)
    assert unpack_tokens(raw).tolist() == list(tokens)
    assert raw == b"".join(int(token).to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], np.array([-1]), np.array([0.5]), [None]])
def test_tokens_that_do_not_fit_are_refused(tokens: Any) -> None:
    with pytest.raises(ContractError, match="token ids"):
        pack_tokens(tokens)


def test_tokens_come_from_the_view_where_there_is_one() -> None:
    old = SimpleNamespace(get_tokens=lambda beam: [1, 2, 3])
    new = SimpleNamespace(get_tokens=None, get_tokens_view=lambda beam: np.array([1, 2, 3], np.int32))
    assert request_tokens(old) == request_tokens(new) == pack_tokens([1, 2, 3])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (SimpleNamespace(), OPEN),
        (SimpleNamespace(cache_salt="s", lora_task_id=3), RequestScope("s", True, 3, ())),
        (SimpleNamespace(cache_salt=None, cache_salt_id=5), RequestScope(None, False, None, ())),
        (SimpleNamespace(cache_salt=None, cache_salt_id=None), OPEN),
        (SimpleNamespace(multimodal_hashes=[[1, -1]]), RequestScope(None, True, None, ("00000001ffffffff",))),
        (SimpleNamespace(multimodal_positions=[4]), RequestScope(None, True, None, None)),
        (SimpleNamespace(multimodal_embedding=object()), RequestScope(None, True, None, None)),
    ],
)
def test_scope_of_a_request(request_: Any, expected: RequestScope) -> None:
    assert scope_of(request_) == expected


def test_requests_that_are_not_ours() -> None:
    assert is_dummy(SimpleNamespace(is_dummy_request=True))
    assert is_dummy(SimpleNamespace(is_dummy=True))
    assert not is_dummy(SimpleNamespace())
    for it in (
        SimpleNamespace(is_generation_only_request=True),
        SimpleNamespace(is_generation_only_request=lambda: True),
        SimpleNamespace(prompt_embedding_table=object()),
    ):
        assert unsupported(it) is Reason.UNSUPPORTED_REQUEST
    assert unsupported(SimpleNamespace(is_generation_only_request=lambda: False)) is None


def test_served_position_where_the_version_has_it() -> None:
    assert served_position(SimpleNamespace(context_current_position=64, prepopulated_prompt_len=32)) == 64
    assert served_position(SimpleNamespace(prepopulated_prompt_len=32)) == 32
    assert served_position(SimpleNamespace()) is None
    assert served_position(SimpleNamespace(context_current_position=-1)) is None
