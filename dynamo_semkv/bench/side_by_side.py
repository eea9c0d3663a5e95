"""The same donors and prompts through several methods (`peers.py`): who ranks the right donor first, who decides as well, at what price.

A negative is a prompt without a right donor. Methods that decide for themselves are taken at their word. Of the others a match
counts when its score is above what at most 1 % of the negatives reach, which is the best threshold that they could have had on
these very prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
    ranked: float
    """Right donor first, no threshold."""
    decided: float
    """Right donor first, and above the threshold where the method has none of its own."""


@dataclass(frozen=True)
class Standing:
    """One method. Times in seconds."""

    method: str
    donors: int
    lines: tuple[Line, ...]
    false_positives: float
    """Share of the negatives that it accepts."""
    negatives: int
    threshold: float | None
    """None: it decides for itself."""
    error_p95: float | None
    """|estimate of the common tokens / truth - 1| of right first matches; None without estimates."""
    adds_per_second: float
    find_p50: float
    find_p99: float


def compare(
    peers: Iterable[Peer],
    donors: Sequence[Donor],
    cases: Sequence[Case],
    say: Callable[[str], None] = lambda text: None,
) -> list[Standing]:
    """Every method gets all donors, then all prompts, one after the other, alone on its thread."""
    return [_standing(peer, donors, cases, say) for peer in peers]


def _standing(peer: Peer, donors: Sequence[Donor], cases: Sequence[Case], say: Callable[[str], None]) -> Standing:
    say(f"{peer.name}: {len(donors)} donors")
    began = time.perf_counter()
    for donor in donors:
        peer.add(donor.donor_id, donor.tokens)
    adding = time.perf_counter() - began
    say(f"{peer.name}: {len(cases)} prompts")
    seconds: list[float] = []
    answers: list[tuple[Case, Found | None]] = []
    for case in cases:
        began = time.perf_counter()
        answers.append((case, peer.find(case.tokens)))
        seconds.append(time.perf_counter() - began)
    peer.close()
    negatives = [found for case, found in answers if not case.right]
    threshold = _threshold(negatives, answers)
    accepted = sum(_accepted(found, threshold) for found in negatives)
    right = [(case, found) for case, found in answers if found is not None and found.donor_id in case.right]
    errors = [abs(f.tokens / case.common - 1) for case, f in right if f.tokens is not None and _accepted(f, threshold)]
    return Standing(
        method=peer.name,
        donors=len(donors),
        lines=tuple(_lines(answers, threshold)),
        false_positives=accepted / max(1, len(negatives)),
        negatives=len(negatives),
        threshold=threshold,
        error_p95=float(np.quantile(errors, 0.95)) if errors else None,
        adds_per_second=len(donors) / adding,
        find_p50=float(np.quantile(seconds, 0.5)),
        find_p99=float(np.quantile(seconds, 0.99)),
    )


def _threshold(negatives: Sequence[Found | None], answers: Sequence[tuple[Case, Found | None]]) -> float | None:
    """None for a method that decides for itself."""
    if all(found is None or found.decided for _, found in answers):
        return None
    scores = sorted((found.score for found in negatives if found is not None), reverse=True)
    allowed = int(FALSE_ALLOWED * len(negatives))
    return scores[allowed] if len(scores) > allowed else 0.0


def _accepted(found: Found | None, threshold: float | None) -> bool:
    return found is not None and (threshold is None or found.score > threshold)


def _lines(answers: Sequence[tuple[Case, Found | None]], threshold: float | None) -> Iterable[Line]:
    by_scenario: dict[str, list[tuple[Case, Found | None]]] = {}
    for case, found in answers:
        if case.right:
            by_scenario.setdefault(case.scenario, []).append((case, found))
    for scenario, part in by_scenario.items():
        right = [found for case, found in part if found is not None and found.donor_id in case.right]
        decided = sum(_accepted(found, threshold) for found in right)
        yield Line(scenario, len(part), len(right) / len(part), decided / len(part))


def table(title: str, standings: Sequence[Standing]) -> Table:
    """A row a scenario, a column a method: right donor first by rank, then as decided."""
    view = Table(title=title, title_justify="left")
    view.add_column("recall@1: ranked / decided", no_wrap=True)
    for standing in standings:
        view.add_column(standing.method, justify="right")
    for n, line in enumerate(standings[0].lines if standings else ()):
        cells = [f"{s.lines[n].ranked:.2f} / {s.lines[n].decided:.2f}" for s in standings]
        view.add_row(f"{line.scenario} ({line.prompts})", *cells)
    rows: list[tuple[str, Callable[[Standing], str]]] = [
        ("negatives accepted", lambda s: f"{s.false_positives:.1%} of {s.negatives}"),
        ("threshold (on these negatives)", lambda s: "own" if s.threshold is None else f"{s.threshold:.2f}"),
        ("95th percentile of token error", lambda s: "" if s.error_p95 is None else f"{s.error_p95:.0%}"),
        ("adds/s", lambda s: f"{s.adds_per_second:.1f}"),
        ("lookup p50 / p99, ms", lambda s: f"{1e3 * s.find_p50:.2f} / {1e3 * s.find_p99:.2f}"),
    ]
    for name, cell in rows:
        view.add_row(name, *(cell(standing) for standing in standings))
    return view
