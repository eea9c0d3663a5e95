"""Does the fingerprint provider find the right donor, and is what it says about it true? `python -m
dynamo_semkv.bench.evidence [--json]`

Labelled prompts made of real text (`labelled.py`), beside background donors of random tokens, through catalog and
provider as a router has them. Every segment is compared with the tokens of prompt and donor. Times are of this machine;
what it costs at scale measures `bench.evidence_cost`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from dynamo_semkv.bench.corpus import installed
from dynamo_semkv.bench.evidence_cost import document
from dynamo_semkv.bench.labelled import Case, Workload, build
from dynamo_semkv.config.evidence import EvidenceConfig
from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.contracts.keys import TokenArray, block_keys
from dynamo_semkv.contracts.namespace import CacheNamespace, tenant_scope
from dynamo_semkv.evidence.catalog import DonorCatalog
from dynamo_semkv.evidence.fingerprint import FingerprintProvider
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.testing import EventTape

BLOCK = 32
_KNOWN = {name: "bench" for name in CacheNamespace.__struct_fields__ if name not in ("tokens_per_block", "multimodal")}
ENGINE = CacheNamespace(**_KNOWN, tokens_per_block=BLOCK, multimodal=())
OURS = ENGINE.for_request(tenant=tenant_scope("bench-a"))
OTHERS = ENGINE.for_request(tenant=tenant_scope("bench-b"))


@dataclass(frozen=True)
class Score:
    """The figures of one scenario. Shares are in [0, 1]; None where there is nothing to take a share of."""

    scenario: str
    cases: int
    recall_at_1: float | None
    """Share of the prompts whose right donor is the first match."""
    matched: float
    """Share of the prompts with any match at all: for negative controls the false positives."""
    true_share: float
    """Mean share of the prompt's tokens that come from the right donor."""
    token_error_p50: float | None
    token_error_p95: float | None
    """|reusable_token_count - truth| over the truth, of right first matches. The truth is the number of tokens that
    come from the donor."""
    run_error_p50: float | None
    run_error_p95: float | None
    """The same error against the tokens in runs of 8 and more (`Case.common_in_runs`)."""
    covered: float | None
    """Mean share of the truth that segments claim."""
    edited: float | None
    """Share of right first matches that are flagged as edited."""
    segments: int
    """Segments of all matches."""
    wrong_segments: int
    """Segments whose tokens differ between prompt and donor."""


@dataclass(frozen=True)
class Report:
    """The figures of one run over one workload."""

    tokens: int
    donors: int
    scores: tuple[Score, ...]
    worst_hidden_overlap: float
    cross_tenant: int
    """Matches for the same prompts from another tenant."""
    lookup_p50: float
    lookup_p99: float
    """Both in seconds, over all prompts."""
    lookup_cpu_p99: float
    """Processor time of the thread: what the lookup takes when nothing else wants the core."""
    sketch_bytes: float
    posting_bytes: float
    """Both per donor, on average: sketches over the labelled donors, postings over all."""


def measure(workload: Workload, background: int, repeats: int = 3) -> Report:
    """Runs the workload. `background`: additional donors of random tokens. Everything but the times is repeatable."""
    provider = FingerprintProvider()
    catalog = DonorCatalog([provider], clock=time.monotonic)
    tape = EventTape()
    catalog.apply(tape.reset())
    for n in range(background):
        catalog.apply(tape.register(f"background-{n}", document(n, workload.tokens), OURS))
        tape.events.clear()
    for n, stranger in enumerate(workload.strangers):
        catalog.apply(tape.register(f"stranger-{n}", stranger, OTHERS))
    for donor in workload.donors:
        catalog.apply(tape.register(donor.donor_id, donor.tokens, OURS))
    donors = {donor.donor_id: donor.tokens for donor in workload.donors}
    queries = [_query(case.tokens, OURS) for case in workload.cases]
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    found: list[Sequence[SemanticTrtMatch]] = []
    for _ in range(repeats):
        found = []
        for query in queries:
            began, cpu_began = time.perf_counter(), time.thread_time()
            matches = provider.lookup(query)
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.thread_time() - cpu_began)
            found.append(_enough(matches))
    crossed = sum(len(provider.lookup(_query(case.tokens, OTHERS))) for case in workload.cases)
    crossed += sum(len(provider.lookup(_query(tokens, OURS))) for tokens in workload.strangers)
    kept = [donor for donor in map(catalog.get, donors) if donor is not None and donor.sketch is not None]
    return Report(
        tokens=workload.tokens,
        donors=len(catalog),
        scores=tuple(_scores(workload.cases, found, donors)),
        worst_hidden_overlap=workload.worst_hidden_overlap,
        cross_tenant=crossed,
        lookup_p50=float(np.quantile(seconds, 0.5)),
        lookup_p99=float(np.quantile(seconds, 0.99)),
        lookup_cpu_p99=float(np.quantile(cpu_seconds, 0.99)),
        sketch_bytes=float(np.mean([len(donor.sketch.raw) for donor in kept if donor.sketch is not None])),
        posting_bytes=provider.snapshot()["posting_bytes"] / max(1, len(provider)),
    )


def _query(tokens: TokenArray, where: CacheNamespace) -> LookupQuery:
    digest = where.digest()
    return LookupQuery(tokens, where, digest, block_keys(digest, tokens, BLOCK))


def _enough(matches: Iterable[SemanticTrtMatch]) -> list[SemanticTrtMatch]:
    """The matches that the deadline runner would pass on."""
    return [match for match in matches if match.reusable_token_count >= EvidenceConfig().min_overlap_tokens]


def _scores(
    cases: Sequence[Case], found: Sequence[Sequence[SemanticTrtMatch]], donors: dict[str, TokenArray]
) -> Iterator[Score]:
    by_scenario: dict[str, list[tuple[Case, Sequence[SemanticTrtMatch]]]] = {}
    for case, matches in zip(cases, found, strict=True):
        by_scenario.setdefault(case.scenario, []).append((case, matches))
    for scenario, answers in by_scenario.items():
        right = [(case, m[0]) for case, m in answers if m and m[0].donor_id in case.right]
        errors = [abs(match.reusable_token_count / case.common - 1) for case, match in right]
        run_errors = [abs(match.reusable_token_count / max(1, case.common_in_runs) - 1) for case, match in right]
        segments = [_truths(case, match, donors) for case, matches in answers for match in matches]
        claimed = [sum(s.token_count for s in match.segments) / case.common for case, match in right]
        positive = bool(answers[0][0].right)
        yield Score(
            scenario=scenario,
            cases=len(answers),
            recall_at_1=len(right) / len(answers) if positive else None,
            matched=sum(bool(matches) for _, matches in answers) / len(answers),
            true_share=float(np.mean([case.common / len(case.tokens) for case, _ in answers])),
            token_error_p50=_quantile(errors, 0.5),
            token_error_p95=_quantile(errors, 0.95),
            run_error_p50=_quantile(run_errors, 0.5),
            run_error_p95=_quantile(run_errors, 0.95),
            covered=float(np.mean(claimed)) if claimed else None,
            edited=sum(match.edited for _, match in right) / len(right) if right else None,
            segments=sum(map(len, segments)),
            wrong_segments=sum(not true for one in segments for true in one),
        )


def _quantile(values: Sequence[float], quantile: float) -> float | None:
    return float(np.quantile(values, quantile)) if values else None


def _truths(case: Case, match: SemanticTrtMatch, donors: dict[str, TokenArray]) -> list[bool]:
    """For each segment, whether its tokens are the same in prompt and donor. A background donor shares nothing, so its
    segments are wrong."""
    donor = donors.get(match.donor_id, np.empty(0, np.uint32))
    return [
        np.array_equal(
            case.tokens[s.target_start : s.target_start + s.token_count],
            donor[s.donor_start : s.donor_start + s.token_count],
        )
        for s in match.segments
    ]


COLUMNS = (
    "prompts",
    "truly shared",
    "recall@1",
    "any match",
    "error p50",
    "error p95",
    "run error p95",
    "in segments",
    "edited",
    "segments",
    "wrong",
)


def table(report: Report) -> Table:
    """The scores as a table, a row per scenario."""
    view = Table(title=f"{report.tokens} tokens a document, {report.donors} donors", title_justify="left")
    view.add_column("scenario", no_wrap=True)
    for name in COLUMNS:
        view.add_column(name, justify="right")
    for score in report.scores:
        shares = (
            score.true_share,
            score.recall_at_1,
            score.matched,
            score.token_error_p50,
            score.token_error_p95,
            score.run_error_p95,
            score.covered,
            score.edited,
        )
        cells = [_percent(value) for value in shares]
        view.add_row(score.scenario, str(score.cases), *cells, str(score.segments), str(score.wrong_segments))
    return view


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def summary(report: Report) -> str:
    """Times, bytes and controls in two lines."""
    return (
        f"lookup p50 {report.lookup_p50 * 1e6:.0f} us, p99 {report.lookup_p99 * 1e6:.0f} us "
        f"({report.lookup_cpu_p99 * 1e6:.0f} us of its own) | bytes a donor: sketch {report.sketch_bytes:.0f}, "
        f"postings {report.posting_bytes:.0f}\n{report.cross_tenant} matches across tenants | negative controls share "
        f"at most {report.worst_hidden_overlap:.1%} of their word 8-grams with donors"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamo_semkv.bench.evidence", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_048, 8_192], help="tokens a document")
    parser.add_argument("--size", type=int, default=12, help="donors a scenario (default: 12)")
    parser.add_argument("--background", type=int, default=2_000, help="donors of random tokens besides (default: 2000)")
    parser.add_argument("--json", action="store_true", help="one JSON list of reports instead of tables")
    arguments = parser.parse_args(argv)
    console = Console()
    reports = []
    for tokens in arguments.tokens:
        report = measure(build(arguments.size, tokens, installed()), arguments.background)
        reports.append(asdict(report))
        if not arguments.json:
            console.print(table(report))
            console.print(summary(report), highlight=False)
    if arguments.json:
        print(json.dumps(reports, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
