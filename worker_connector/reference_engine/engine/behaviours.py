"""Which of TensorRT-LLM's less common paths a rank takes, and the dice that decide when.

Each switch names a path that a connector must survive; sources are TensorRT-LLM's "KV Cache Connector" document and the
files under `tensorrt_llm/_torch/pyexecutor/` that are named with it. Rates are probabilities, drawn at each opportunity
from one seeded generator per rank, so a seed repeats its schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Protocol

DIALECTS = ("M", "B")
TRIMS = ("off", "shrink", "defer")


@dataclass(frozen=True)
class Behaviours:
    """The switches of one engine. ValueError at construction names the field, its value and what is allowed."""

    seed: int = 0
    #: Variant of the connector API. "M" is TensorRT-LLM's main branch. "B" is the Mooncake store's branch
    #: (NVIDIA/TensorRT-LLM#18676): blocks of a report are a dict by layer group id, and hooks are called where a
    #: connector has them: `cancel_load` for the unhonoured end of an offer, `request_reset` when pages are destroyed,
    #: and `take_failed_load_requests`, `take_failed_async_load_requests` and `drop_bound_saves`, by which a failed load
    #: restarts its request.
    dialect: str = "M"
    #: Dialect "B" asks before it allocates: by the time of the allocation the local cache has caught up with the
    #: beginning of an offer, which `cancel_load` cuts off.
    overtaken_offer_rate: float = 0.0
    #: The next forward pass starts before the last one's tokens are known: what ends a request (its token,
    #: cancellation, commit, request_finished) comes one iteration late, and the first report of a generating request
    #: has no new token (py_executor.py, `_executor_loop_overlap`).
    overlap_scheduling: bool = False
    #: After the queries a batch may have more tokens than the budget allows (NVIDIA/TensorRT-LLM#13318). "shrink":
    #: chunks are shortened; "defer": a chunk that cannot be shortened leaves the batch with all that come after it,
    #: although it was asked about and has pages (resource_manager.py, `fit_token_budget`, newer and older).
    token_budget_trim: str = "off"
    #: How often the budget turns out smaller than what was scheduled.
    trim_rate: float = 0.0
    #: True: the connector is told the chunk sizes before the trim, as by versions before NVIDIA/TensorRT-LLM#13318.
    report_before_trim: bool = False
    #: A batch is dropped behind start_load_kv, as when another attention data-parallel rank has nothing to run: what
    #: was reported is not computed, and reported again (py_executor.py, the second `_can_queue`).
    dropped_batch_rate: float = 0.0
    #: A dropped batch takes from its requests the pages that they grew by for it, although these were reported. When a
    #: request grows again it gets other pages, and the reports do not say so, since they count blocks. A request that
    #: was served more than it had pages for before loses all its pages (`_revert_gen_alloc`,
    #: `revert_allocate_context`). Only with kv_cache_manager "v2".
    dropped_batch_reverts: bool = False
    #: A rank with nothing to run, or only requests that wait for a load, runs a dummy request: a pass with all hooks,
    #: for which nothing is asked, reported or finished (py_executor.py, `_pad_empty_attention_dp_batch`). Needs several
    #: ranks.
    dummy_rate: float = 0.0
    #: Pages for an offer beyond the chunk are not found: the runtime honours whole blocks of the pages that it has, or
    #: nothing (kv_cache_manager_v2.py, `_apply_connector_matched_prefix`). Only with kv_cache_manager "v2".
    failed_grow_rate: float = 0.0
    #: A running request loses its pages and starts over; it is asked about and reported as new again (V2 schedules as
    #: MAX_UTILIZATION does). The tokens that it had generated are then part of its prompt.
    destroyed_allocation_rate: float = 0.0
    #: The block ids of a finished request cannot be read: request_finished is not called
    #: (`_save_kv_to_connector_async`).
    lost_finish_rate: float = 0.0
    #: Forward passes over all pages before the connector is attached.
    warmup_forwards: int = 0

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise ValueError(f"dialect is {self.dialect!r}; it must be one of {DIALECTS}")
        if self.token_budget_trim not in TRIMS:
            raise ValueError(f"token_budget_trim is {self.token_budget_trim!r}; it must be one of {TRIMS}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_rate") and not 0 <= value <= 1:
                raise ValueError(f"{field.name} is {value}; it must be in [0, 1]")
        if self.overtaken_offer_rate and self.dialect != "B":
            raise ValueError(f"overtaken_offer_rate is {self.overtaken_offer_rate}; only dialect 'B' has such offers")
        if self.warmup_forwards < 0:
            raise ValueError(f"warmup_forwards is {self.warmup_forwards}; it must be 0 or more")


class Dice(Protocol):
    """Decides what happens; a test replaces it to choose a schedule itself."""

    def hits(self, what: str, rate: float) -> bool:
        """Whether it happens this time. `what` is the switch without "_rate"."""

    def below(self, what: str, bound: int) -> int:
        """A number from 0 to `bound` - 1; `bound` is at least 1."""


class SeededDice:
    """Draws from one seeded generator. Rates of 0 draw nothing, so a switch that is off does not move the others."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def hits(self, what: str, rate: float) -> bool:
        """Draws only for a rate above 0."""
        return rate > 0 and self._random.random() < rate

    def below(self, what: str, bound: int) -> int:
        """Draws uniformly."""
        return self._random.randrange(bound)
