"""The connector's own paths to keys and digests arrive at the golden vectors of the contracts.

Routers compute from a request, engines from `LlmRequest`, packed tokens and a tree of blocks: were one of them to
differ, donors would never be found and reports never joined, without an error anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_semkv.contracts.keys import prompt_key
from dynamo_semkv.contracts.namespace import CacheNamespace
from dynamo_semkv.contracts.sketch import DonorSketch
from worker_connector.engine_api.request_view import pack_tokens, request_tokens, scope_of, unpack_tokens
from worker_connector.ledger.ledger import Ledger
from worker_connector.requests.engine_namespace import RequestNamespaces

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "contracts" / "golden.json").read_text())
BLOCK = 32


def lcg(seed: int, count: int) -> list[int]:
    """As tests/contracts/golden.py defines it, written down a second time."""
    made, state = [], seed
    while len(made) < count:
        state = (6364136223846793005 * state + 1442695040888963407) & (2**64 - 1)
        made.append((state >> 33) % 50000)
    return made


def request(tokens: list[int], **attributes: Any) -> Any:
    """What TensorRT-LLM's LlmRequest shows of itself."""
    return SimpleNamespace(request_id=1, get_tokens=lambda beam: list(tokens), **attributes)


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "tenant-a"},
    "other_salt": {"cache_salt": "tenant-b"},
    "lora": {"lora_task_id": 1},
    "image": {"multimodal_hashes": [[0] * 8]},
    "other_image": {"multimodal_hashes": [[0x11111111] * 8]},
    "everything": {"cache_salt": "tenant-a", "lora_task_id": 1, "multimodal_hashes": [[0] * 8, [0x11111111] * 8]},
}


@pytest.fixture
def namespaces() -> RequestNamespaces:
    base = msgspec.convert(GOLDEN["namespaces"]["engine"]["fields"], CacheNamespace)
    return RequestNamespaces(base, {1: "rev-a"}, bytes.fromhex(GOLDEN["salt_key"]))


def digest_of(namespaces: RequestNamespaces, name: str) -> bytes:
    _, digest, problem = namespaces.of(scope_of(request([], **REQUESTS[name])))
    assert problem is None
    return digest


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_the_namespace_of_a_request(namespaces: RequestNamespaces, name: str) -> None:
    assert digest_of(namespaces, name).hex() == GOLDEN["namespaces"][name]["digest"]


def test_another_revision_of_an_adapter_is_another_namespace() -> None:
    base = msgspec.convert(GOLDEN["namespaces"]["engine"]["fields"], CacheNamespace)
    newer = RequestNamespaces(base, {1: "rev-b", 2: "rev-a"}, bytes.fromhex(GOLDEN["salt_key"]))
    assert digest_of(newer, "lora").hex() == GOLDEN["namespaces"]["lora_other_revision"]["digest"]
    other = newer.of(scope_of(request([], lora_task_id=2)))[1]
    assert other.hex() == GOLDEN["namespaces"]["other_lora"]["digest"]


@pytest.mark.parametrize("row", GOLDEN["keys"], ids=lambda row: f"{row['namespace']}-{row['seed']}-{row['count']}")
def test_the_tree_of_blocks_has_the_chain_of_keys(row: dict[str, Any]) -> None:
    digest = bytes.fromhex(GOLDEN["namespaces"][row["namespace"]]["digest"])
    packed = request_tokens(request(lcg(row["seed"], row["count"])))
    ledger = Ledger(64, BLOCK)
    entry, keys = None, []
    for at in range(0, len(packed) - BLOCK * 4 + 1, BLOCK * 4):
        entry = ledger.enter(digest, entry, packed[at : at + BLOCK * 4])
        assert entry is not None
        keys.append(entry.key.hex())
    assert keys == row["block_keys"]
    if entry is not None:
        assert entry.chain()[0].parent is not None
        assert entry.chain()[0].parent.key.hex() == row["root"]


@pytest.mark.parametrize("row", GOLDEN["keys"], ids=lambda row: f"{row['namespace']}-{row['seed']}-{row['count']}")
def test_the_prompt_key_of_packed_tokens(row: dict[str, Any]) -> None:
    """As the report has it: digest of the request's namespace, tokens as the engine shows them."""
    digest = bytes.fromhex(GOLDEN["namespaces"][row["namespace"]]["digest"])
    packed = pack_tokens(lcg(row["seed"], row["count"]))
    assert prompt_key(digest, unpack_tokens(packed)).hex() == row["prompt_key"]


@pytest.mark.parametrize("name", ["plain", "salted"])
def test_the_sketch_of_a_donor(namespaces: RequestNamespaces, name: str) -> None:
    digest = digest_of(namespaces, name)
    packed = pack_tokens(lcg(3, 1000))
    ledger = Ledger(64, BLOCK)
    chain, entry = [], None
    for at in range(0, len(packed) - BLOCK * 4 + 1, BLOCK * 4):
        entry = ledger.enter(digest, entry, packed[at : at + BLOCK * 4])
        assert entry is not None
        chain.append(entry.key)
    assert DonorSketch.of(unpack_tokens(packed), digest, chain).to_bytes().hex() == GOLDEN["sketches"][name]
