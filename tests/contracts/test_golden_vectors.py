"""Keys and digests are the same everywhere and for ever: against golden.json, over processes and hash seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_semkv.contracts.sketch import DonorSketch
from tests.contracts import golden
from tests.contracts.messages import BY_NAME

KEY_PARTS = ("salt_key", "tenant_scopes", "semblend_tenant_keys", "namespaces", "tokens", "keys")
MORE_PARTS = ("stable_worker_ids", "subjects", "sketches")


@pytest.mark.parametrize("part", [*KEY_PARTS, *MORE_PARTS])
def test_computed_now_equals_what_is_stored(part: str) -> None:
    assert golden.compute()[part] == golden.stored()[part]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295"])
def test_another_process_with_another_hash_seed_computes_the_same(hash_seed: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.contracts.golden"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(ran.stdout) == golden.compute()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_stored_messages_still_decode(name: str) -> None:
    """A newer build may write more fields; what an older one wrote it still understands, to the same value."""
    message = BY_NAME[name]
    old = bytes.fromhex(golden.stored()["messages"][name])
    assert message.decode(old) == message.decode(golden.messages()[name])


@pytest.mark.parametrize("name", ["plain", "salted"])
def test_stored_sketches_decode(name: str) -> None:
    raw = bytes.fromhex(golden.stored()["sketches"][name])
    sketch = DonorSketch.from_bytes(raw)
    assert (sketch.token_count, sketch.to_bytes()) == (1000, raw)
    assert sketch.sample_count > 10


def test_every_kind_of_request_has_keys_of_its_own() -> None:
    """Salt, adapter, adapter revision and media change the digest, the root, every block key and the prompt key."""
    rows = [row for row in golden.stored()["keys"] if (row["seed"], row["count"]) == (1, 100)]
    assert len(rows) == len(golden.namespaces())
    everything = [key for row in rows for key in (row["root"], row["prompt_key"], *row["block_keys"])]
    assert len(everything) == len(rows) * 5
    assert len(set(everything)) == len(everything)
    digests = [entry["digest"] for entry in golden.stored()["namespaces"].values()]
    assert len(set(digests)) == len(digests)


def test_equal_text_under_two_tenants_has_unrelated_samples() -> None:
    plain, salted = (DonorSketch.from_bytes(bytes.fromhex(raw)) for raw in golden.stored()["sketches"].values())
    assert not set(plain.fingerprints.tolist()) & set(salted.fingerprints.tolist())
    assert not {key for _, key in plain.checkpoints} & {key for _, key in salted.checkpoints}
