"""The requests of the report: the RFC's benchmark scenarios ("Benchmark scenarios"), sized for an engine on a CPU.

A scenario is passes; a pass is requests with the times at which they are sent, from the start of the pass. A pass ends
with its last answer. `empties_device` makes the engines drop their own blocks before a pass (their reset route), so
that the effect of host memory shows. The group of a scenario says which contenders it is for (`graphs.bench.groups`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dynamo_semkv.bench import scenarios
from dynamo_semkv.bench.report.arrivals import CONVERSATION_INTERVALS, offsets
from dynamo_semkv.bench.report.library import Library
from dynamo_semkv.bench.scenarios import QUESTIONS, ChatRequest
from dynamo_semkv.bench.texts import Document

UNHURRIED = 3.0
"""How many times as far apart as usual the requests are."""
ANSWER_TOKENS = 8
"""Enough to compare answers, few enough that time to first token is what is measured."""


@dataclass(frozen=True)
class Pass:
    """Requests that are sent at their times, and answered before the next pass begins."""

    requests: tuple[ChatRequest, ...] = field(repr=False)
    offsets: tuple[float, ...]
    """Seconds, one per request, not falling."""
    empties_device: bool = False
    phases: tuple[str, ...] = ()
    """One per request, for figures that are of one phase only: `first`, `again`, `after_eviction`. Empty: no such
    figures."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.requests) or len(self.phases) not in (0, len(self.requests)):
            raise ValueError(
                f"offsets and phases: got {len(self.offsets)} and {len(self.phases)}, there are {len(self.requests)} "
                "requests"
            )

    def phase(self, number: int) -> str:
        """The phase of a request; empty where there are none."""
        return self.phases[number] if self.phases else ""


@dataclass(frozen=True)
class Timed:
    """One scenario as it is sent. `kind`: `reuse` (something was sent before), `negative` (nothing was), `unhurried`
    (nothing was, and the engines are mostly idle), or `load`."""

    name: str
    title: str
    kind: str
    passes: tuple[Pass, ...] = field(repr=False)

    @property
    def requests(self) -> int:
        """How many, over all passes."""
        return sum(len(one.requests) for one in self.passes)


@dataclass(frozen=True)
class Sizes:
    """Characters of a document, and how many requests; `gap` in seconds between arrivals, on average."""

    characters: int
    gap: float
    repeats: int = 4
    """Requests over one document."""
    documents: int = 8
    """How many documents a working set has."""
    passes: int = 3
    negatives: int = 6
    batch: int = 24
    """Requests of the high-load batch, all unlike each other."""


def _timed(name: str, title: str, kind: str, requests: Sequence[ChatRequest], gap: float) -> Timed:
    return Timed(name, title, kind, (Pass(_answers(requests), offsets("uniform", len(requests), gap=gap)),))


def _answers(requests: Sequence[ChatRequest]) -> tuple[ChatRequest, ...]:
    return tuple(ChatRequest(r.messages, r.cache_salt, ANSWER_TOKENS) for r in requests)


def exact_repeat(library: Library, sizes: Sizes) -> Timed:
    """One document as the system prompt, asked about again and again."""
    made = scenarios.repeated_system_prompt(library.take(sizes.characters), sizes.repeats + 1)
    return _timed("system_prompt", "exact repeated system prompt", "reuse", made.requests, sizes.gap)


def partial_overlap(library: Library, sizes: Sizes) -> Timed:
    """The first half is the same each time, the second half is not."""
    half = sizes.characters // 2
    head = library.take(half).text
    asks = [
        ChatRequest(({"role": "system", "content": head + library.take(half).text}, _user(QUESTIONS[0])))
        for _ in range(sizes.repeats)
    ]
    return _timed("partial_overlap", "partial exact overlap (first half)", "reuse", asks, sizes.gap)


def paraphrased_qa(pairs: Sequence[tuple[str, str]], sizes: Sizes) -> Timed:
    """`pairs`: the same content in two wordings, see `bench.paraphrase`. Both are asked about, one after the other."""
    asks = []
    for donor, prompt in pairs:
        for text in (donor, prompt):
            asks.append(
                ChatRequest(({"role": "system", "content": _ascii(text, sizes.characters)}, _user(QUESTIONS[1])))
            )
    return _timed("paraphrase", "paraphrased long-document QA", "reuse", asks, sizes.gap)


def other_instruction(library: Library, sizes: Sizes) -> Timed:
    """Two documents, each behind two instructions."""
    made = scenarios.same_document_other_instruction(library.many(2, sizes.characters))
    return _timed("other_instruction", "same document, other instruction", "reuse", made.requests, sizes.gap)


def reordered(library: Library, sizes: Sizes, seed: int) -> Timed:
    """Three retrieved chunks in changing order."""
    chunk = min(1_200, sizes.characters // 3)
    made = scenarios.reordered_chunks(library.many(3, chunk), sizes.repeats, seed)
    return _timed("reordered_chunks", "reordered RAG chunks", "reuse", made.requests, sizes.gap)


def agent(library: Library, sizes: Sizes) -> Timed:
    """One conversation that grows by a turn each time."""
    made = scenarios.agent_turns(library.many(sizes.repeats, max(200, sizes.characters // 4)), sizes.repeats + 1)
    return _timed("agent", "multi-turn agent, repeated tool schema", "reuse", made.requests, sizes.gap)


def working_set(
    library: Library,
    sizes: Sizes,
    pattern: str,
    intervals: Sequence[float] = CONVERSATION_INTERVALS,
    *,
    name: str = "working_set",
    title: str = "host offload: working set twice the device pools",
    salt: str | None = None,
) -> Timed:
    """Every document once per pass, in the same order: between two requests for a document all others are sent. `salt`:
    of a tenant, whose blocks in host memory Dynamo's index does not know."""
    documents = library.many(sizes.documents, sizes.characters)
    made = scenarios.large_working_set(documents, sizes.passes).requests
    size = len(documents)
    times = offsets(pattern, len(made), gap=sizes.gap, intervals=intervals)
    phases = ("first",) * size + ("again",) * (len(made) - size)
    one = Pass(tuple(replace(request, cache_salt=salt) for request in _answers(made)), times, phases=phases)
    return Timed(f"{name}_{pattern}", f"{title}, {pattern} arrivals", "reuse", (one,))


def high_load(library: Library, sizes: Sizes, answer_tokens: int = 16) -> Timed:
    """All requests at once and no two alike: what looking for donors costs when there are none."""
    asks = [
        ChatRequest((_user(library.take(sizes.characters // 3).text),), None, answer_tokens) for _ in range(sizes.batch)
    ]
    return Timed(
        "high_load",
        "high-load batch, nothing alike",
        "load",
        (Pass(tuple(asks), offsets("at_once", len(asks), gap=0)),),
    )


def tenants(library: Library, sizes: Sizes) -> Timed:
    """The same two documents from two tenants, which must not share KV."""
    made = scenarios.two_tenants(library.many(2, sizes.characters))
    return _timed("tenants", "same documents, two tenants", "negative", made.requests, sizes.gap)


def negatives(library: Library, sizes: Sizes) -> Timed:
    """Documents that nobody sent before."""
    made = scenarios.negative_controls(library.many(sizes.negatives, sizes.characters))
    return _timed("negative", "negative controls", "negative", made.requests, sizes.gap)


def unhurried(library: Library, sizes: Sizes) -> Timed:
    """Negative controls that find the engines idle: the cost of our router by itself, without the effect of missing
    processors."""
    made = scenarios.negative_controls(library.many(sizes.negatives, sizes.characters))
    title = "negative controls, three times as far apart"
    return _timed("negative_unhurried", title, "unhurried", made.requests, UNHURRIED * sizes.gap)


def by_length(library: Library, lengths: Sequence[int], name: str = "long", unit: str = "tokens") -> list[Timed]:
    """For each length in characters (a byte tokenizer makes as many tokens of them): a cold request, exactly the same
    again, and the same after the device has forgotten it."""
    found = []
    for length in lengths:
        ask = _answers([_ask(library.take(length))])
        passes = (
            Pass(ask, (0.0,), phases=("first",)),
            Pass(ask, (0.0,), phases=("again",)),
            Pass(ask, (0.0,), empties_device=True, phases=("after_eviction",)),
        )
        found.append(Timed(f"{name}_{_thousands(length)}", f"prompt of {_thousands(length)} {unit}", "reuse", passes))
    return found


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """The order of contenders within one block of interleaving: it differs between seeds and is the same for the same
    seed."""
    order = list(names)
    random.Random(seed).shuffle(order)
    return order


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length}"


def _ask(document: Document) -> ChatRequest:
    return ChatRequest(({"role": "system", "content": document.text}, _user(QUESTIONS[0])))


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _ascii(text: str, characters: int) -> str:
    return text.encode("ascii", "ignore").decode()[:characters]
