"""Translates a preprocessed request of Dynamo into what the engine is asked; checks every limit and names every
refusal.

Pure: no Dynamo, no engine. Field names are those of Dynamo's PreprocessedRequest as its own engines read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from dynamo_semkv.contracts.codec import envelope_from_plain
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.hints import EXTRA_ARGS_KEY, FETCH_ACTION, KvHintsEnvelope
from dynamo_semkv.contracts.identity import check_route_id
from worker_connector.reference_engine.models.sampling import SamplingParams


class BadRequest(ValueError):
    """The request asks for something that this engine does not do. The text is for the client: it names the field, the
    value and what is allowed."""


def _bad(field: str, value: object, allowed: str) -> BadRequest:
    return BadRequest(f"{field}: got {value!r}, allowed: {allowed}")


@dataclass(frozen=True)
class Submission:
    """What the engine is asked for one request."""

    token_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    """Tokens that end the request when generated; the engine does it unless `min_tokens` is set."""
    min_tokens: int
    dp_rank: int | None
    cache_salt: str | None

    def rank_of(self, ranks: int) -> int | None:
        """Which of so many data-parallel ranks gets the request; None: the engine will choose."""
        return self.dp_rank if self.dp_rank is not None else 0 if ranks == 1 else None


def submission(
    request: Mapping[str, Any], token_ids: list[int], *, token_limit: int, data_parallel_size: int
) -> Submission:
    """Checks and translates one request. `token_ids` are the request's own, whatever form the request plane gave them;
    `token_limit` bounds prompt and output together. Raises BadRequest."""
    _refuse_unsupported(request)
    routing = _mapping(request, "routing")
    stop = _mapping(request, "stop_conditions")
    room = token_limit - len(token_ids)
    if not token_ids or room < 1:
        raise _bad("token_ids", f"{len(token_ids)} tokens", f"1 to {token_limit - 1} tokens")
    wanted = stop.get("max_tokens")
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise _bad("stop_conditions.max_tokens", wanted, "at least 1")
    minimum = stop.get("min_tokens") or 0
    if not isinstance(minimum, int) or minimum < 0:
        raise _bad("stop_conditions.min_tokens", minimum, "0 or more")
    return Submission(
        token_ids=token_ids,
        max_new_tokens=room if wanted is None else min(wanted, room),
        sampling=_sampling(_mapping(request, "sampling_options")),
        stop_token_ids=_stop_tokens(request, stop),
        min_tokens=minimum,
        dp_rank=_dp_rank(routing, data_parallel_size),
        cache_salt=_cache_salt(request, routing),
    )


def _mapping(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = request.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _bad(name, type(value).__name__, "an object")
    return value


def _refuse_unsupported(request: Mapping[str, Any]) -> None:
    """Refuses, rather than ignores, options that would change the answer and are not supported here."""
    if request.get("multi_modal_data"):
        raise _bad("multi_modal_data", "media", "text only")
    sampling = _mapping(request, "sampling_options")
    neutral: dict[str, tuple[Any, ...]] = {
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "guided_decoding": (),
    }
    for name, allowed in neutral.items():
        value = sampling.get(name)
        if value is not None and value not in allowed:
            shown = f"absent or {allowed[0]!r}" if allowed else "absent"
            raise _bad(f"sampling_options.{name}", value, shown)
    if _mapping(request, "routing").get("lora_name"):
        raise _bad("routing.lora_name", request["routing"]["lora_name"], "absent")
    output = _mapping(request, "output_options")
    for name in ("logprobs", "prompt_logprobs"):
        if output.get(name) is not None:
            raise _bad(f"output_options.{name}", output[name], "absent")


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Greedy unless something is asked for, as TensorRT-LLM does."""
    temperature, top_p, top_k = options.get("temperature"), options.get("top_p"), options.get("top_k")
    if temperature is None and top_p is None and top_k is None:
        return SamplingParams()
    try:
        return SamplingParams(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            top_k=max(0, int(top_k or 0)),  # -1 is "off" to vLLM's clients
            seed=options.get("seed"),
        )
    except (TypeError, ValueError) as error:
        raise _bad("sampling_options", dict(options), str(error)) from error


def _stop_tokens(request: Mapping[str, Any], stop: Mapping[str, Any]) -> frozenset[int]:
    """End-of-turn tokens of the model card and what the client asked for. Stop *strings* are the frontend's matter."""
    asked = _ids("stop_conditions.stop_token_ids", stop.get("stop_token_ids"))
    if stop.get("ignore_eos"):
        return asked
    hidden = _ids("stop_conditions.stop_token_ids_hidden", stop.get("stop_token_ids_hidden"))
    return asked | hidden | _ids("eos_token_ids", request.get("eos_token_ids"))


def _ids(field: str, value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not isinstance(value, (list, tuple)) or not all(isinstance(token, int) for token in value):
        raise _bad(field, value, "a list of token ids")
    return frozenset(value)


def _dp_rank(routing: Mapping[str, Any], size: int) -> int | None:
    rank = routing.get("dp_rank")
    if rank is None:
        return None
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
        raise _bad("routing.dp_rank", rank, f"0 to {size - 1}")
    return rank


def _cache_salt(request: Mapping[str, Any], routing: Mapping[str, Any]) -> str | None:
    """`routing.cache_salt`, which the router saw too. An empty salt is none, as for Dynamo's own engines. A request
    that also names another salt is refused: one of the two belongs to somebody else."""
    salt = routing.get("cache_salt") or None
    nvext = _mapping(_mapping(request, "extra_args"), "nvext")
    told = nvext.get("cache_salt") or None
    if salt is not None and told is not None and salt != told:
        raise _bad("routing.cache_salt", "<redacted>", "the same as nvext.cache_salt")
    salt = salt if salt is not None else told
    if salt is not None and not isinstance(salt, str):
        raise _bad("routing.cache_salt", type(salt).__name__, "a string")
    return salt


def merged_hints(request: Mapping[str, Any]) -> tuple[KvHintsEnvelope | None, list[str]]:
    """Puts Dynamo's own `kv_hint` and ours from `extra_args.semkv` into one envelope (RFC versioned KV hints: actions
    are independent). Nothing else of a request is looked at. An address (`kv.fetch`) is taken from `kv_hint` only,
    which Dynamo's router makes or removes: in `extra_args` it would be a client's, or a mistake.

    The second value says what was refused, and why; the rest still counts.
    """
    found, refused = [], []
    for name, value in (
        (EXTRA_ARGS_KEY, _mapping(request, "extra_args").get(EXTRA_ARGS_KEY)),
        ("kv_hint", request.get("kv_hint")),
    ):
        if value is None:
            continue
        try:
            envelope = envelope_from_plain(value)
        except ContractError as error:
            refused.append(str(error))
            continue
        kept = [action for action in envelope.actions if name == "kv_hint" or action.action_type != FETCH_ACTION]
        if len(kept) < len(envelope.actions):
            refused.append(f"{FETCH_ACTION} in extra_args.{EXTRA_ARGS_KEY}: only Dynamo's router says where blocks are")
        found.append(replace(envelope, actions=kept))
    if not found:
        return None, refused
    first = found[0]
    return KvHintsEnvelope(
        protocol_version=first.protocol_version,
        message_id=first.message_id,
        actions=[action for envelope in found for action in envelope.actions],
    ), refused


def route_of(request: Mapping[str, Any]) -> str | None:
    """The route that our router's envelope names, for the log; None for a request without one."""
    extra = request.get("extra_args")
    envelope = extra.get(EXTRA_ARGS_KEY) if isinstance(extra, Mapping) else None
    named = envelope.get("message_id") if isinstance(envelope, Mapping) else None
    try:
        return check_route_id(named) if isinstance(named, str) else None
    except ContractError:
        return None
