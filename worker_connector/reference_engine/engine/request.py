"""A request inside the engine, readable by a connector like TensorRT-LLM's `LlmRequest`.

The public attributes and methods are those that TensorRT-LLM binds, under its names; `py_*` ones are set by the
connector bookkeeping as there. Attributes of an `LlmRequest` that the engine has no use for are left out, so a
connector has to read them with getattr, and there is no `kv_hints` unless the submitter gave one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker_connector.reference_engine.engine.block_manager import BlockSequence
from worker_connector.reference_engine.models.sampling import Sampler, SamplingParams
from worker_connector.reference_engine.models.weights import LoraWeights


class RequestState(enum.Enum):
    """States under TensorRT-LLM's names. The two DISAGG states are those in which a request waits for an asynchronous
    load or save."""

    CONTEXT_INIT = "context_init"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    #: The token under way is the last one.
    GENERATION_TO_COMPLETE = "generation_to_complete"
    GENERATION_COMPLETE = "generation_complete"
    DISAGG_GENERATION_TRANS_IN_PROGRESS = "loading"
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = "saving"


@dataclass(frozen=True)
class RequestOptions:
    """What a submitter asks for; token counts in tokens."""

    max_new_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    lora_task_id: int | None = None
    #: One digest per multimodal item, eight 32-bit words each, as TensorRT-LLM has them.
    multimodal_hashes: tuple[tuple[int, ...], ...] = ()
    #: Retention priority 0..100 of the request's blocks; None is the default.
    retention_priority: int | None = None
    #: Set on the request as `kv_hints` if not None.
    kv_hints: Any = None


class LlmRequest:
    """One request. Connectors read it; only the engine thread that owns it writes."""

    is_child = False
    is_context_only_request = False
    num_draft_tokens = 0

    def __init__(
        self, request_id: int, prompt: Sequence[int], options: RequestOptions, lora: LoraWeights | None
    ) -> None:
        self.request_id = request_id
        #: Padding of attention data parallelism (`engine/dummy.py`).
        self.is_dummy_request = False
        self.options = options
        self.lora = lora
        self.sampler = Sampler(options.sampling)
        self.state = RequestState.CONTEXT_INIT
        #: Pages, from admission until termination.
        self.blocks: BlockSequence | None = None

        self.prompt_len = self.orig_prompt_len = len(prompt)
        self.max_new_tokens = options.max_new_tokens
        self.cache_salt = options.cache_salt
        self.lora_task_id = options.lora_task_id
        self.multimodal_hashes = [list(words) for words in options.multimodal_hashes] or None
        if options.kv_hints is not None:
            self.kv_hints = options.kv_hints

        #: First prompt position whose KV the engine does not have.
        self.context_current_position = 0
        self.context_chunk_size = 0
        #: Where the first chunk starts: local reuse plus what the connector serves.
        self.prepopulated_prompt_len = 0
        #: Of that, tokens reused on the device.
        self.device_reused_tokens = 0
        #: Blocks that the request had pages for before this iteration.
        self.blocks_before = 0
        #: Counts KV allocations of the request: grows when one is destroyed and when the request ends.
        self.allocation = 0
        #: A sampled token that the host does not know yet (overlap scheduling).
        self.inflight_token: int | None = None
        #: Both as of the first forward pass; a replay does not change them.
        self.cached_tokens = 0
        self.cached_on_device = 0
        self._cached_noted = False

        self.py_num_connector_matched_tokens = 0
        self.py_connector_served_position = 0
        self.py_connector_allocation_reported = False

        self._tokens = list(prompt)

    def get_tokens(self, beam: int | None = None) -> list[int] | list[list[int]]:
        """Prompt and generated tokens of one beam, or of all beams without an argument. A copy."""
        if beam is None:
            return [list(self._tokens)]
        self._check_beam(beam)
        return list(self._tokens)

    def get_token(self, beam: int, position: int) -> int:
        """One prompt or generated token, by position. IndexError for a beam other than 0."""
        self._check_beam(beam)
        return self._tokens[position]

    def get_num_tokens(self, beam: int) -> int:
        """Prompt plus generated tokens that the host knows. IndexError for a beam other than 0."""
        self._check_beam(beam)
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The engine's own list, without a copy."""
        return self._tokens

    @property
    def device_tokens(self) -> list[int]:
        """All tokens that have been sampled, known to the host or not."""
        return self._tokens if self.inflight_token is None else [*self._tokens, self.inflight_token]

    @property
    def max_beam_num_tokens(self) -> int:
        """As `get_num_tokens`, over all beams: there is one."""
        return len(self._tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens that the host knows, over all replays."""
        return len(self._tokens) - self.orig_prompt_len

    @property
    def context_remaining_length(self) -> int:
        """Prompt tokens that have no KV yet."""
        return self.prompt_len - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        """True while nothing of the prompt was computed in this allocation."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        """True if the scheduled chunk reaches the prompt's end."""
        return self.context_current_position + self.context_chunk_size >= self.prompt_len

    @property
    def is_finished(self) -> bool:
        """True after the last token; never for a cancelled or failed request."""
        return self.state is RequestState.GENERATION_COMPLETE

    def is_generation_only_request(self) -> bool:
        """A method, as on TensorRT-LLM's Python request; its C++ twin has a property of this name."""
        return False

    def has_draft_tokens(self) -> bool:
        """Never: the engine does not speculate."""
        return False

    def append(self, token: int) -> None:
        """The host learns a generated token."""
        self._tokens.append(token)

    def note_cached(self) -> None:
        """Sets `cached_tokens`, once, to the prompt tokens that were not computed: the number that a response
        carries."""
        if not self._cached_noted:
            self._cached_noted = True
            self.cached_tokens, self.cached_on_device = self.prepopulated_prompt_len, self.device_reused_tokens

    def restart(self) -> None:
        """Called when the request's pages are gone: all tokens that it has become its prompt, as after TensorRT-LLM's
        `pause`."""
        self.allocation += 1
        self.blocks = None
        self.inflight_token = None
        self.state = RequestState.CONTEXT_INIT
        self.prompt_len = len(self._tokens)
        self.context_current_position = self.context_chunk_size = self.prepopulated_prompt_len = 0
        self.device_reused_tokens = 0
        self.py_num_connector_matched_tokens = self.py_connector_served_position = 0
        self.py_connector_allocation_reported = False

    @staticmethod
    def _check_beam(beam: int) -> None:
        if beam != 0:
            raise IndexError(f"beam is {beam}; the engine decodes one beam, 0")
