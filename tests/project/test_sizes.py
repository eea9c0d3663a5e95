"""docs/operations.md, "Sizes" and the silent misses: the bytes are those of the code, the names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo_semkv.advice.decision import DecisionReason
from dynamo_semkv.config.schema import BusConfig, Config
from dynamo_semkv.contracts import codec
from dynamo_semkv.contracts.donor_events import (
    NAMESPACE_DIGEST_EXTRA,
    DonorEvent,
    DonorRegistered,
    DonorSegment,
    WireNamespace,
)
from dynamo_semkv.contracts.identity import U64_MAX
from dynamo_semkv.contracts.keys import block_keys
from dynamo_semkv.contracts.location import Tier, WorkerLocation
from dynamo_semkv.contracts.report import Outcome, Reason
from dynamo_semkv.contracts.sketch import DonorSketch
from dynamo_semkv.router.replicas import Standing
from tests.contracts import golden, peer
from tests.evidence.documents import BLOCK, document, namespace

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
SIZES = TEXT.partition("\n## Sizes\n")[2].partition("\n## ")[0]
MISSES = TEXT.partition("\n## When every request is a silent miss\n")[2].partition("\n## ")[0]
GIB = 2**30


def table(first: str, text: str = SIZES) -> dict[str, list[str]]:
    """Rows below the head that begins so: first cell -> the others."""
    block = text.partition(f"| {first}")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block]
    return {row[0]: row[1:] for row in cells}


def number(text: str) -> int:
    return int(text.replace(",", ""))


MODELS = {
    "SmolLM2-135M": 2 * 30 * 3 * 64 * 2,
    "Qwen3-8B": 2 * 36 * 8 * 128 * 2,
    "Llama-3.1-8B": 2 * 32 * 8 * 128 * 2,
    "Qwen3-32B": 2 * 64 * 8 * 128 * 2,
    "Llama-3.1-70B, all ranks together": 2 * 80 * 8 * 128 * 2,
    "DeepSeek-V3 (MLA), each rank": 61 * (512 + 64) * 2,
}
"""Layers, KV heads and head sizes of their public config.json."""


def test_bytes_of_a_token() -> None:
    found = table("model, 16-bit KV")
    assert set(found) == set(MODELS)
    for name, each in MODELS.items():
        assert [number(cell) for cell in found[name]] == [each, GIB // each], name


def donor_bytes(tokens: int) -> int:
    """As long as ours are: names of 40 characters, identities of full length."""
    text, where = document(1, tokens), namespace()
    digest = where.digest()
    sketch = DonorSketch.of(text, digest, block_keys(digest, text, BLOCK)).to_bytes()
    wire = WireNamespace(
        model="m" * 40,
        tokenizer="t" * 40,
        kv_layout="l" * 16,
        block_size=BLOCK,
        extra={NAMESPACE_DIGEST_EXTRA: digest.hex()},
    )
    data = DonorRegistered(
        donor_id="d" * 32,
        namespace=wire,
        location=WorkerLocation(U64_MAX, 0, Tier.HOST_PINNED),
        token_count=tokens,
        segments=[DonorSegment(segment_id=0, token_range=(0, tokens), digest=U64_MAX, provider_metadata=sketch)],
        provider_generation="g" * 16,
    )
    event = DonorEvent(schema_version=1, event_id=10**6, worker_id=U64_MAX, dp_rank=0, data=data)
    return len(codec.encode_donor_event(event, codec.MSGPACK))


def test_bytes_on_the_bus() -> None:
    found = {name: number(cells[0]) for name, cells in table("message").items()}
    expected = {
        **{f"donor of {tokens:,} tokens": donor_bytes(tokens) for tokens in (1_024, 8_192, 32_768)},
        "route opened": len(codec.encode_route_event(peer.made("opened"))),
        "route observed": len(codec.encode_route_event(peer.made("observed"))),
        "report": len(codec.encode_report(peer.made("report"))),
        "announcement": len(golden.messages()["announcement"]),
    }
    assert found.keys() == expected.keys()
    for name, size in expected.items():
        assert found[name] == pytest.approx(size, rel=0.1), f"{name}: {size} now; write it anew"


def test_what_follows_from_them() -> None:
    assert "`bus.stream_max_age_seconds`" in SIZES or "bus.stream_max_age_seconds" in SIZES
    bus, rows = BusConfig(), table("message")
    a_request = number(rows["route opened"][0]) + number(rows["route observed"][0])
    (kept,) = re.findall(r"routes would take ([\d.]+) GB", SIZES)
    assert float(kept) == pytest.approx(50 * bus.stream_max_age_seconds * a_request / 1e9, rel=0.05)
    (minutes,) = re.findall(r"the last (\d+) minutes", SIZES)
    assert int(minutes) == pytest.approx(bus.stream_max_bytes / (50 * a_request) / 60, rel=0.05)
    (donors,) = re.findall(r"256 MiB are ([\d,]+) donors", SIZES)
    assert number(donors) == pytest.approx(bus.stream_max_bytes / number(rows["donor of 8,192 tokens"][0]), rel=0.05)


def test_bounds_are_the_defaults() -> None:
    config = Config()
    assert f"{config.evidence.fingerprint.max_donors:,} are 360 MB" in SIZES
    assert f"{config.outcome.history_size:,} are 54 MB" in SIZES
    assert f"{config.evidence.embedding.max_donors:,} are 128 MB" in SIZES


def test_reasons_of_silent_misses_exist() -> None:
    known = {value.value for kind in (DecisionReason, Reason, Outcome, Standing) for value in kind}
    known |= {"miss", "explain --last 20"}
    told = table("what has to hold", MISSES)
    assert len(told) > 12
    for cells in told.values():
        assert set(re.findall(r"`([a-z_]+)`", cells[0])) <= known, cells
