"""The same donors and prompts through several methods (`peers.py`): which ranks the right donor first, which decides
right as well, and at what cost.

A negative is a prompt without a right donor. Methods that decide for themselves are taken at their word. For the others
a match counts when its score is above what at most 1 % of the negatives reach, which is the best threshold that they
could have had on these very prompts.

Slow methods are bounded by time, not left out: a method is asked prompts of all scenarios in turn until its seconds are
spent, and the table says how many it was asked. A method that cannot add all donors within its seconds is not asked at
all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from rich.table import Table

from dynamo_semkv.bench.labelled import Case, Donor
from dynamo_semkv.bench.peers import Found, Peer

FALSE_ALLOWED = 0.01


@dataclass(frozen=True)
class Line:
    """One method on one scenario. Shares in [0, 1]."""

    scenario: str
    prompts: int
    """How many prompts it was asked."""
    ranked: float | None
    """Share with the right donor first, without a threshold; None where it was asked none."""
    decided: float | None
    """Share with the right donor first, and above the threshold where the method has no decision of its own."""


@dataclass(frozen=True)
class Standing:
    """The figures of one method. Times in seconds."""

    method: str
    donors: int
    lines: tuple[Line, ...]
    false_positives: float
    """Share of the negatives that it accepts."""
    negatives: int
    threshold: float | None
    """None: the method decides for itself."""
    error_p95: float | None
    """|estimate of the common tokens / truth - 1| of right first matches; None without estimates."""
    adds_per_second: float
    find_p50: float | None
    find_p99: float | None
    asked: int = 0
    """How many of the `of` prompts it was asked within its seconds."""
    of: int = 0


def compare(
    peers: Iterable[Peer],
    donors: Sequence[Donor],
    cases: Sequence[Case],
    say: Callable[[str], None] = lambda text: None,
    budget: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> list[Standing]:
    """Every method gets all donors, then the prompts, one after the other, alone on its thread. `budget`: seconds that
    one method has for the donors, and again for the prompts."""
    return [_standing(peer, donors, in_turn(cases), say, budget, clock) for peer in peers]


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """One case of each scenario, then the next of each, so that a method that is stopped was asked something of every
    scenario."""
    by_scenario: dict[str, list[Case]] = {}
    for case in cases:
        by_scenario.setdefault(case.scenario, []).append(case)
    rounds = zip_longest(*by_scenario.values())
    return [case for case in chain.from_iterable(rounds) if case is not None]


def _standing(
    peer: Peer,
    donors: Sequence[Donor],
    cases: Sequence[Case],
    say: Callable[[str], None],
    budget: float,
    clock: Callable[[], float],
) -> Standing:
    say(f"{peer.name}: {len(donors)} donors")
    began, known = clock(), 0
    for donor in donors:
        if clock() - began > budget:
            break
        peer.add(donor.donor_id, donor.tokens)
        known += 1
    adding = clock() - began
    say(f"{peer.name}: {known} donors in {adding:.1f} s, {len(cases)} prompts")
    seconds: list[float] = []
    answers: list[tuple[Case, Found | None]] = []
    asking = clock()
    for case in cases if known == len(donors) else ():
        began = clock()
        if began - asking > budget:
            say(f"{peer.name}: {budget:.0f} s are over after {len(answers)} prompts")
            break
        answers.append((case, peer.find(case.tokens)))
        seconds.append(clock() - began)
    peer.close()
    negatives = [found for case, found in answers if not case.right]
    threshold = _threshold(negatives, answers)
    accepted = sum(_accepted(found, threshold) for found in negatives)
    right = [(case, found) for case, found in answers if found is not None and found.donor_id in case.right]
    errors = [abs(f.tokens / case.common - 1) for case, f in right if f.tokens is not None and _accepted(f, threshold)]
    return Standing(
        method=peer.name,
        donors=known,
        lines=tuple(_lines(dict.fromkeys(case.scenario for case in cases if case.right), answers, threshold)),
        false_positives=accepted / max(1, len(negatives)),
        negatives=len(negatives),
        threshold=threshold,
        error_p95=float(np.quantile(errors, 0.95)) if errors else None,
        adds_per_second=known / max(1e-9, adding),
        find_p50=float(np.quantile(seconds, 0.5)) if seconds else None,
        find_p99=float(np.quantile(seconds, 0.99)) if seconds else None,
        asked=len(answers),
        of=len(cases),
    )


def _threshold(negatives: Sequence[Found | None], answers: Sequence[tuple[Case, Found | None]]) -> float | None:
    """The lowest score that counts; None for methods that decide for themselves."""
    if all(found is None or found.decided for _, found in answers):
        return None
    scores = sorted((found.score for found in negatives if found is not None), reverse=True)
    allowed = int(FALSE_ALLOWED * len(negatives))
    return scores[allowed] if len(scores) > allowed else 0.0


def _accepted(found: Found | None, threshold: float | None) -> bool:
    return found is not None and (threshold is None or found.score > threshold)


def _lines(
    scenarios: Iterable[str], answers: Sequence[tuple[Case, Found | None]], threshold: float | None
) -> Iterable[Line]:
    for scenario in scenarios:
        part = [(case, found) for case, found in answers if case.scenario == scenario]
        right = [found for case, found in part if found is not None and found.donor_id in case.right]
        decided = sum(_accepted(found, threshold) for found in right)
        yield Line(scenario, len(part), len(right) / len(part) if part else None, decided / len(part) if part else None)


def _cell(standing: Standing, n: int) -> str:
    line = standing.lines[n]
    if line.ranked is None or line.decided is None:
        return "not asked"
    return f"{line.ranked:.2f} / {line.decided:.2f}"


def _lookups(standing: Standing) -> str:
    if standing.find_p50 is None or standing.find_p99 is None:
        return ""
    return f"{1e3 * standing.find_p50:.2f} / {1e3 * standing.find_p99:.2f}"


def table(title: str, standings: Sequence[Standing]) -> Table:
    """A row per scenario, a column per method: right donor first as ranked, then as decided."""
    view = Table(title=title, title_justify="left")
    view.add_column("recall@1: ranked / decided", no_wrap=True)
    for standing in standings:
        view.add_column(standing.method, justify="right")
    for n, line in enumerate(standings[0].lines if standings else ()):
        view.add_row(
            f"{line.scenario} ({max(s.lines[n].prompts for s in standings)})", *(_cell(s, n) for s in standings)
        )
    rows: list[tuple[str, Callable[[Standing], str]]] = [
        ("prompts asked", lambda s: f"{s.asked} of {s.of}"),
        ("negatives accepted", lambda s: f"{s.false_positives:.1%} of {s.negatives}"),
        ("threshold (on these negatives)", lambda s: "own" if s.threshold is None else f"{s.threshold:.2f}"),
        ("95th percentile of token error", lambda s: "" if s.error_p95 is None else f"{s.error_p95:.0%}"),
        ("adds/s", lambda s: f"{s.adds_per_second:.1f}"),
        ("lookup p50 / p99, ms", _lookups),
    ]
    for name, cell in rows:
        view.add_row(name, *(cell(standing) for standing in standings))
    return view
