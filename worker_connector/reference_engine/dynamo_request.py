"""A Dynamo request -> arguments of `Engine.submit`, and engine output -> Dynamo chunks. Pure.

Field names are those of Dynamo's PreprocessedRequest and LLMEngineOutput (1.6.1), as its own Python workers read and write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_semkv.contracts.codec import envelope_from_plain
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import EXTRA_ARGS_KEY, KvHintsEnvelope
from worker_connector.reference_engine.outcome import RequestStats
from worker_connector.reference_engine.sampling import SamplingParams

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled"}


@dataclass(frozen=True)
class Submission:
    """What one request asks of the engine."""

    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    dp_rank: int | None
    cache_salt: str | None


def submission(request: Mapping[str, Any], token_limit: int) -> Submission:
    """`token_limit`: prompt and output together, at most. ValueError names what this engine cannot do."""
    tokens = list(request.get("token_ids") or ())
    if not tokens:
        raise ValueError("token_ids: got none, a prompt needs at least one token")
    room = token_limit - len(tokens)
    if room < 1:
        raise ValueError(f"token_ids: got {len(tokens)} tokens, this engine holds {token_limit} with the output")
    if request.get("multi_modal_data"):
        raise ValueError("multi_modal_data: this engine serves text only")
    stop: Mapping[str, Any] = request.get("stop_conditions") or {}
    sampling: Mapping[str, Any] = request.get("sampling_options") or {}
    if (sampling.get("n") or 1) != 1:
        raise ValueError(f"sampling_options.n: got {sampling['n']}, this engine makes 1")
    eos: set[int] = set(stop.get("stop_token_ids_hidden") or stop.get("stop_token_ids") or ())
    if not stop.get("ignore_eos"):
        eos |= set(request.get("eos_token_ids") or ())
    routing: Mapping[str, Any] = request.get("routing") or {}
    rank = routing.get("dp_rank")
    return Submission(
        tokens=tokens,
        max_new_tokens=max(1, min(room, stop.get("max_tokens") or room)),
        sampling=SamplingParams(
            temperature=_or(sampling.get("temperature"), 0.0),
            top_p=_or(sampling.get("top_p"), 1.0),
            top_k=max(0, _or(sampling.get("top_k"), 0)),
            seed=sampling.get("seed"),
        ),
        eos_token_ids=frozenset(eos),
        dp_rank=None if rank is None else int(rank),
        cache_salt=cache_salt(request),
    )


def cache_salt(request: Mapping[str, Any]) -> str | None:
    """The tenant's salt, from where Dynamo puts it; an empty one is none, as everywhere in Dynamo (ai-dynamo/dynamo#8197)."""
    routing: Mapping[str, Any] = request.get("routing") or {}
    nvext: Mapping[str, Any] = (request.get("extra_args") or {}).get("nvext") or {}
    return routing.get("cache_salt") or nvext.get("cache_salt") or None


def merged_hints(request: Mapping[str, Any]) -> tuple[KvHintsEnvelope | None, list[str]]:
    """Dynamo's own `kv_hint` and ours from `extra_args.semkv` in one envelope (RFC versioned KV hints: actions are independent).

    Second value: why an envelope was refused; the other one still counts.
    """
    found, refused = [], []
    for value in (request.get("kv_hint"), (request.get("extra_args") or {}).get(EXTRA_ARGS_KEY)):
        if value is None:
            continue
        try:
            found.append(envelope_from_plain(value))
        except ContractError as error:
            refused.append(str(error))
    if not found:
        return None, refused
    first = found[0]
    return KvHintsEnvelope(
        protocol_version=first.protocol_version,
        message_id=first.message_id,
        actions=[action for envelope in found for action in envelope.actions],
    ), refused


def chunk(token_ids: Sequence[int], finish_reason: str | None, stats: RequestStats) -> dict[str, Any]:
    """One LLMEngineOutput. The last one carries the usage, with the engine's own count of what it did not compute."""
    out: dict[str, Any] = {"token_ids": list(token_ids), "index": 0}
    if finish_reason is None:
        return out
    out["finish_reason"] = FINISH_REASONS.get(finish_reason) or f"error: {stats.error or finish_reason}"
    out["engine_data"] = {
        "kv_cache_hit": {"prompt_tokens": stats.prompt_tokens, "reused_tokens": stats.cached_tokens},
    }
    out["completion_usage"] = {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }
    return out


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
