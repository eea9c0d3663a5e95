"""The labelled workload: prompts of which every token's origin is known, against donors made of the same real text.

A scenario says how prompts were made from donors, never what the result must be. Prompts whose every word is new are
the negative controls; their hidden overlap with all donors is measured by word 8-grams, another method than the one
under test.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynamo_semkv.bench.corpus import DIGITS, SENTENCE_END, documents, hidden_overlaps, tokens_of
from dynamo_semkv.contracts.keys import TokenArray
from dynamo_semkv.contracts.sketch import NGRAM

I64 = npt.NDArray[np.int64]

EDIT_EVERY = (100, 50, 25)
CHUNKS = 10
SIBLINGS = 6
NUMBER_EVERY = 40
"""Tokens between two numbers of four digits in brackets: with all digits changed about nine tokens in ten remain."""
MAX_HIDDEN_OVERLAP = 0.02
MIN_RUN = NGRAM

ASKED_FIRST = tokens_of(
    "You answer in one short sentence. Read the text that follows, then the question at its end. Text: "
)
QUESTION = tokens_of("Question: which rule does the text state first, and for whom does it hold? Answer: ")
ASKED_LATER = tokens_of(
    "As a careful editor, list what remains open in this draft, a line for each point. Draft begins. "
)
DEMAND = tokens_of("Draft ends. Be brief, keep the order of the draft, and leave out whatever is settled already. ")


@dataclass(frozen=True)
class Donor:
    """One donor: its id and its prompt's tokens, u32."""

    donor_id: str
    tokens: TokenArray


@dataclass(frozen=True)
class Case:
    """One prompt, and what is true of it."""

    scenario: str
    tokens: TokenArray = field(repr=False)
    right: tuple[str, ...] = ()
    """Donors of which one should be the first match; empty for negative controls."""
    common: int = 0
    """Tokens that come from a right donor unchanged."""
    common_in_runs: int = 0
    """The part of `common` in runs of MIN_RUN and more: shorter ones, between digits for example, are invisible to any
    window."""


@dataclass(frozen=True)
class Workload:
    """Donors and prompts of documents of one length."""

    tokens: int
    """The length of a document."""
    donors: tuple[Donor, ...]
    cases: tuple[Case, ...]
    strangers: tuple[TokenArray, ...]
    """Documents of another tenant, which must not match."""
    worst_hidden_overlap: float
    """The largest overlap of a negative control with all donors together, in [0, 1]."""


def build(size: int, tokens: int, sources: Iterable[str], seed: int = 7, negatives: int = 0) -> Workload:
    """`size` donors per scenario, of documents of `tokens` tokens, and at least `negatives` negative controls; always
    the same for the same sources.

    Raises ValueError when the sources hold too little, or when a negative control overlaps with a donor.
    """
    texts = documents(4 * size + 2 + max(0, negatives - size), tokens, sources)
    bodies = [tokens_of(text)[:tokens] for text in texts]
    plain, fresh, numbered, negative = (bodies[n * size : (n + 1) * size] for n in range(4))
    template, stranger = bodies[4 * size][: min(1_400, tokens // 3)], bodies[4 * size + 1]
    rng = random.Random(seed)
    donors: list[Donor] = []
    cases: list[Case] = []
    for n, (body, other) in enumerate(zip(plain, negative, strict=True)):
        donors.append(_donor(f"plain-{n}", body))
        cases += _from_plain((f"plain-{n}",), body, other, rng)
    for n, body in enumerate(numbered):
        made = list(_numbered(f"numbered-{n}", body, rng))
        donors += [donor for donor, _ in made]
        cases += [case for _, found in made for case in found]
    for n, body in enumerate(fresh):
        donors.append(Donor(f"template-{n}", _join(template, ASKED_FIRST, body, QUESTION)))
        # These should be flagged as edited: the instruction between template and body was changed, the rest was not.
        prompt, right = _join(template, ASKED_LATER, body, DEMAND), (f"template-{n}",)
        cases.append(_case("same template, own body", prompt, right, len(template) + len(body)))
    carriers = tuple(f"template-{n}" for n in range(size))
    for body in negative:
        prompt = _join(template, ASKED_LATER, body, DEMAND)
        cases.append(_case("same template, new body", prompt, carriers, len(template)))
    cases += [Case("negative", _later(body)) for body in (*negative, *bodies[4 * size + 2 :])]
    worst = _hidden(texts, size)
    if worst > MAX_HIDDEN_OVERLAP:
        raise ValueError(f"negative controls: got a hidden overlap of {worst:.3f}, allowed: {MAX_HIDDEN_OVERLAP}")
    return Workload(tokens, tuple(donors), tuple(cases), (_first(stranger),), worst)


def _hidden(texts: Sequence[str], size: int) -> float:
    known = [*texts[: 3 * size], texts[4 * size]]
    return max(hidden_overlaps([*texts[3 * size : 4 * size], *texts[4 * size + 2 :]], known))


def _join(*parts: TokenArray) -> TokenArray:
    return np.concatenate(parts).astype(np.uint32)


def _first(body: TokenArray) -> TokenArray:
    return _join(ASKED_FIRST, body, QUESTION)


def _later(body: TokenArray) -> TokenArray:
    return _join(ASKED_LATER, body, DEMAND)


def _donor(donor_id: str, body: TokenArray) -> Donor:
    return Donor(donor_id, _first(body))


def _case(scenario: str, prompt: TokenArray, right: tuple[str, ...], common: int) -> Case:
    """A case whose common tokens all are in long runs."""
    return Case(scenario, prompt, right, common, common)


def _changed(scenario: str, body: TokenArray, origin: I64, right: tuple[str, ...]) -> Case:
    common, in_runs = common_tokens(origin)
    return Case(scenario, _later(body), right, common, in_runs)


def common_tokens(origin: I64) -> tuple[int, int]:
    """(tokens that are not foreign, those of them in runs of MIN_RUN and more). `origin`: for each token of a text its
    position in the donor's, -1 for a foreign one."""
    breaks = np.flatnonzero((origin[1:] != origin[:-1] + 1) | (origin[:-1] < 0)) + 1
    runs = [run for run in np.split(origin, breaks) if len(run) and run[0] >= 0]
    return sum(map(len, runs)), sum(len(run) for run in runs if len(run) >= MIN_RUN)


def _from_plain(right: tuple[str, ...], body: TokenArray, other: TokenArray, rng: random.Random) -> Iterator[Case]:
    yield _case("other instruction", _later(body), right, len(body))
    chunks = np.array_split(body, CHUNKS)
    rng.shuffle(chunks)
    yield _case("reordered chunks", _later(_join(*chunks)), right, len(body))
    kept, new = chunks[: CHUNKS // 2], np.array_split(other, CHUNKS)[: CHUNKS // 2]
    mixed = [chunk for pair in zip(new, kept, strict=True) for chunk in pair]
    yield _case("5 of 10 chunks shared", _later(_join(*mixed)), right, sum(map(len, kept)))
    for every in EDIT_EVERY:
        yield _changed(f"1 in {every} tokens edited", *edited(body, every, rng), right)


def edited(body: TokenArray, every: int, rng: random.Random) -> tuple[TokenArray, I64]:
    """In each `every` tokens one is replaced by another of the document, left out, or gets one inserted before it. Also
    returns the origin of each token (see `common_tokens`)."""
    words = body.tolist()
    out: list[int] = []
    origin: list[int] = []
    for start in range(0, len(words), every):
        part = words[start : start + every]
        at = rng.randrange(len(part))
        how = rng.choice(("replace", "delete", "insert"))
        foreign = rng.choice([word for word in rng.sample(words, min(8, len(words))) if word != part[at]] or [1])
        middle = {"replace": [foreign], "delete": [], "insert": [foreign, part[at]]}[how]
        here = {"replace": [-1], "delete": [], "insert": [-1, start + at]}[how]
        out += part[:at] + middle + part[at + 1 :]
        origin += [*range(start, start + at), *here, *range(start + at + 1, start + len(part))]
    return np.array(out, np.uint32), np.array(origin, np.int64)


def with_numbers(body: TokenArray, rng: random.Random) -> TokenArray:
    """The body with a number in brackets after every sentence that ends NUMBER_EVERY tokens or more after the last
    number; cut to the body's length."""
    out: list[int] = []
    since = 0
    bracket = tokens_of("()").tolist()
    for token in body.tolist():
        out.append(token)
        since += 1
        if since >= NUMBER_EVERY and token == SENTENCE_END:
            out += [bracket[0], *(int(DIGITS[rng.randrange(10)]) for _ in range(4)), bracket[1]]
            since = 0
    return np.array(out[: len(body)], np.uint32)


def other_numbers(body: TokenArray, rng: random.Random) -> TokenArray:
    """The body with every digit replaced by another digit."""
    out: TokenArray = body.copy()
    for at in np.flatnonzero(np.isin(body, DIGITS)).tolist():
        out[at] = rng.choice([digit for digit in DIGITS.tolist() if digit != body[at]])
    return out


def _numbered(name: str, body: TokenArray, rng: random.Random) -> Iterator[tuple[Donor, list[Case]]]:
    """Siblings that differ in numbers only, of which one is asked for again; and a text whose numbers were all changed,
    with one donor."""
    half = len(body) // 2
    base = with_numbers(body[:half], rng)
    alone = with_numbers(body[half:], rng)
    chosen = rng.randrange(SIBLINGS)
    for n in range(SIBLINGS):
        sibling = other_numbers(base, rng)
        case = _case("right one of 6 number-only siblings", _later(sibling), (f"{name}-{n}",), len(sibling))
        yield _donor(f"{name}-{n}", sibling), [case] if n == chosen else []
    changed = other_numbers(alone, rng)
    origin = np.where(changed == alone, np.arange(len(alone)), -1)
    yield (
        _donor(f"{name}-alone", alone),
        [_changed("all numbers changed", changed, origin, (f"{name}-alone",))],
    )
