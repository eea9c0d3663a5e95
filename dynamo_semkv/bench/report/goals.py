"""Every goal of the project as one row: what was promised, the figure, where it comes from, yes or no.

A goal whose section was not measured says so: it is neither met nor missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_semkv.bench.report.statistics import Figure, Figures, growth
from dynamo_semkv.config.schema import FingerprintConfig

VERBATIM = ("other instruction", "reordered chunks", "5 of 10 chunks shared", "sibling", "template")
EDITED = ("1 in", "numbers changed")
MIN_SHARED = 0.2
LEAST_SHARE = FingerprintConfig().min_overlap_share
GOAL_DONORS = 100_000


@dataclass(frozen=True)
class Measured:
    """`met` None: shown without a threshold."""

    figure: str
    met: bool | None
    note: str = ""


@dataclass(frozen=True)
class Goal:
    part: str
    """`Connector`, `Evidence` or `Placement`."""
    text: str
    source: str
    """The command whose section has the figure."""
    judge: Callable[[Figures], Measured | None]
    """None: not measured in this run."""


@dataclass(frozen=True)
class Verdict:
    goal: Goal
    measured: Measured | None

    @property
    def word(self) -> str:
        if self.measured is None:
            return "not measured"
        return "shown" if self.measured.met is None else "yes" if self.measured.met else "**no**"


def verdicts(figures: Figures) -> list[Verdict]:
    return [Verdict(goal, goal.judge(figures)) for goal in GOALS]


def _matching(figures: Figures, start: str, end: str) -> dict[str, Figure]:
    return {path: figure for path, figure in figures.items() if path.startswith(start) and path.endswith(end)}


def _worst(
    start: str,
    end: str,
    limit: float,
    show: Callable[[float], str],
    *,
    most: bool,
    within: Callable[[str], bool] = lambda path: True,
) -> Callable[[Figures], Measured | None]:
    """The worst median of all figures that fit; `most`: the limit is the most that is allowed, else the least."""

    def judge(figures: Figures) -> Measured | None:
        found = {path: f.median for path, f in _matching(figures, start, end).items() if within(path)}
        if not found:
            return None
        path = (max if most else min)(found, key=lambda one: found[one])
        value = found[path]
        where = path.removeprefix(start).removesuffix(end).strip("/")
        return Measured(show(value), value <= limit if most else value >= limit, where)

    return judge


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _us(micros: float) -> str:
    return f"{micros / 1e3:.2f} ms"


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _scenario(*names: str) -> Callable[[str], bool]:
    return lambda path: any(name in path for name in names)


def _large_blocks(path: str) -> bool:
    return int(path.split("/")[3]) >= 64 * 1024


def _recall(figures: Figures) -> Measured | None:
    """Of verbatim scenarios. What shares less than the provider is set to look for is named, and does not count."""
    found: dict[str, float] = {}
    below: dict[str, float] = {}
    for path, figure in _matching(figures, "evidence/", "/recall_at_1").items():
        share = figures.get(path.replace("/recall_at_1", "/true_share"))
        if share is not None and _scenario(*VERBATIM)(path):
            where = path.removeprefix("evidence/").removesuffix("/recall_at_1")
            (found if share.median >= LEAST_SHARE else below)[where] = figure.median
    if not found:
        return None
    worst = min(found, key=lambda one: found[one])
    note = worst + "".join(
        f"; not counted, shares less than {LEAST_SHARE:.0%}: {one} {value:.3f}" for one, value in below.items()
    )
    return Measured(_ratio(found[worst]), found[worst] >= 0.99, note)


def _edited_flag(figures: Figures) -> Measured | None:
    found = [f.median for path, f in _matching(figures, "evidence/", "/edited").items() if _scenario(*EDITED)(path)]
    return Measured(_percent(min(found)), min(found) >= 0.95, "the worst scenario") if found else None


def _wrong_segments(figures: Figures) -> Measured | None:
    wrong = _matching(figures, "evidence/", "/wrong_segments")
    if not wrong:
        return None
    total = sum(f.median for f in _matching(figures, "evidence/", "/segments").values())
    count = sum(f.median for f in wrong.values())
    return Measured(f"{count:.0f} of {total:.0f}", count == 0)


def _recall_with_threshold(figures: Figures) -> Measured | None:
    """Of scenarios whose true common tokens make up a fifth, at the false positives of the negatives of the same length."""
    recalls, false = [], []
    for path, figure in _matching(figures, "evidence/", "/recall_at_1").items():
        share = figures.get(path.replace("/recall_at_1", "/true_share"))
        if share is not None and share.median >= MIN_SHARED:
            recalls.append(figure.median)
    false = [f.median for path, f in _matching(figures, "evidence/", "/matched").items() if "negative" in path]
    if not recalls or not false:
        return None
    note = f"the worst scenario; false positives {max(false):.1%}"
    return Measured(_ratio(min(recalls)), min(recalls) >= 0.95 and max(false) <= 0.01, note)


def _paraphrase(figures: Figures) -> Measured | None:
    found = {p: f.median for p, f in _matching(figures, "evidence/paraphrase/embedding", "/decided").items()}
    if not found:
        return None
    text = "; ".join(f"{path.split('/')[-2].partition(', ')[2]} {value:.2f}" for path, value in found.items())
    return Measured(text, min(found.values()) >= 0.9)


def _against_semblend(figures: Figures) -> Measured | None:
    rows = {path.split("/")[2]: f.median for path, f in _matching(figures, "evidence/peers", "/find_p50").items()}
    ours = next((value for name, value in rows.items() if "fingerprint" in name), None)
    theirs = next((value for name, value in rows.items() if "semblend" in name.lower()), None)
    if ours is None or theirs is None:
        return None
    return Measured(f"{theirs / ours:,.0f} times ({_ms(ours)} against {_ms(theirs)})", theirs / ours >= 100)


def _judged_donors(figures: Figures) -> int | None:
    """As many as the goal names, or the most that were measured where those are fewer."""
    found = {int(path.split("/")[2]) for path in figures if path.startswith("scaling/donors/")}
    return max((donors for donors in found if donors <= GOAL_DONORS), default=None)


def _largest(
    name: str, limit: float, show: Callable[[float], str], *, most: bool
) -> Callable[[Figures], Measured | None]:
    """Met only if 100,000 donors were measured; what a million cost is in the page's growth laws."""

    def judge(figures: Figures) -> Measured | None:
        donors = _judged_donors(figures)
        figure = figures.get(f"scaling/donors/{donors}/{name}")
        if donors is None or figure is None:
            return None
        good = figure.median <= limit if most else figure.median >= limit
        # What is true of fewer donors says nothing about the goal.
        return Measured(show(figure.median), good if donors == GOAL_DONORS else None, f"{donors:,} donors")

    return judge


def _events(figures: Figures) -> Measured | None:
    """Of a catalog without an index."""
    start, end = "scaling/catalog/", "_per_second"
    found = {path.removeprefix(start).removesuffix(end): f.median for path, f in _matching(figures, start, end).items()}
    if not found:
        return None
    text = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in found.items())
    slow = [name for name, rate in found.items() if rate < 50_000]
    note = f"{', '.join(slow)}: reading, checking and copying the sketch of 2.4 kB that each carries" if slow else ""
    return Measured(text, None if slow == ["registrations"] else not slow, note)


def _lookup_growth(figures: Figures) -> Measured | None:
    found = _matching(figures, "scaling/donors/", "/hit_p50")
    points = sorted((int(path.split("/")[2]), figure.median) for path, figure in found.items())
    exponent = growth([x for x, _ in points], [y for _, y in points])
    if exponent is None:
        return None
    least, most = points[0][0], points[-1][0]
    # The logarithm's own over this range: log(100,000) / log(1,000) = 1.67 in two decades is 0.11.
    allowed = math.log(math.log(most) / math.log(least)) / math.log(most / least)
    return Measured(f"exponent {exponent:.2f}", exponent <= allowed, f"{least:,} to {most:,} donors, median of hits")


def _compared(scenario: str, limit: float, group: str = "rfc") -> Callable[[Figures], Measured | None]:
    def judge(figures: Figures) -> Measured | None:
        figure = figures.get(f"scenarios/{group}/{scenario}/semkv/ttft_mean_to_kv")
        if figure is None:
            return None
        note = f"{figure.low:.2f} to {figure.high:.2f}"
        by_request = figures.get(f"scenarios/{group}/{scenario}/semkv/ttft_request_to_kv")
        if by_request is not None:
            note += f"; of the same requests, median {by_request.median:.2f}"
        return Measured(f"{figure.median:.2f}", figure.median <= limit, note)

    return judge


def _lookup_in_a_batch(figures: Figures) -> Measured | None:
    """Nothing is alike there, so a lookup can only cost."""
    start = "scenarios/rfc/high_load"
    figure = figures.get(f"{start}/semkv/tokens_per_second_to_no_lookup")
    if figure is None:
        return None
    over_kv = [
        f"{words} {found.median:.2f}"
        for contender, words in (
            ("semkv", "ours"),
            ("kv_connector", "the connector alone"),
            ("passing", "a router off"),
        )
        if (found := figures.get(f"{start}/{contender}/tokens_per_second_to_kv")) is not None
    ]
    note = f"{figure.low:.2f} to {figure.high:.2f}; over Dynamo kv: {', '.join(over_kv)}"
    return Measured(f"{figure.median:.2f}", figure.median >= 0.98, note)


def _hop(figures: Figures) -> Measured | None:
    """What a router that decides nothing takes, where nothing can be reused."""
    start, end = "scenarios/rfc/", "/passing/ttft_mean_to_kv"
    found = _matching(figures, start, end)
    texts = [f"{path.removeprefix(start).removesuffix(end)} {figure.median:.2f}" for path, figure in found.items()]
    return Measured(", ".join(texts), None) if texts else None


def _question(limit: float) -> Callable[[Figures], Measured | None]:
    """The slower of the two numbers of resident prompts."""

    def judge(figures: Figures) -> Measured | None:
        found = {path: f.median for path, f in _matching(figures, "connector/lookup/32768/", "array/p99").items()}
        if not found:
            return None
        path = max(found, key=lambda one: found[one])
        own = figures.get(path.replace("/p99", "/own_p99"))
        note = f"{path.split('/')[3]} prompts resident"
        note += "" if own is None else f"; {_ms(own.median)} of its own processor time"
        return Measured(_ms(found[path]), found[path] <= limit, note)

    return judge


def _exact_quality(figures: Figures) -> Measured | None:
    found = _matching(figures, "scenarios/exactness/", "/max_difference_loaded_warm")
    aligned = _matching(figures, "scenarios/exactness/", "aligned/max_difference_loaded_cold")
    if not found:
        return None
    worst = max(f.median for f in found.values())
    cold = ", ".join(f"{path.split('/')[3]} {f.median:.1e}" for path, f in aligned.items())
    return Measured(f"{worst:.1f}", worst == 0.0, f"to the cold run: {cold}")


def _router(quantile: str, limit_ms: float) -> Callable[[Figures], Measured | None]:
    def judge(figures: Figures) -> Measured | None:
        figure = figures.get(f"router/stages/whole/wall_{quantile}")
        if figure is None:
            return None
        own = figures.get(f"router/stages/whole/own_{quantile}")
        note = "" if own is None else f"{own.median:.2f} ms of processor time; without Dynamo's own part"
        return Measured(f"{figure.median:.2f} ms", figure.median <= limit_ms, note)

    return judge


def _shown(start: str, end: str) -> Callable[[Figures], Measured | None]:
    def judge(figures: Figures) -> Measured | None:
        found = _matching(figures, start, end)
        return Measured(", ".join(f"{figure.median:.2f}" for figure in found.values()), None) if found else None

    return judge


def _shown_replay(figures: Figures) -> Measured | None:
    start = "replay/salted/materializes/"
    found = _matching(figures, start, "/mean_prefill_tokens")
    if not found:
        return None
    text = ", ".join(f"{path.split('/')[3]} {figure.median:,.0f}" for path, figure in found.items())
    return Measured(text, None, "prefill tokens a request; Dynamo's index does not see the host tier")


EVIDENCE, CONNECTOR, SCENARIOS, SCALING = "bench evidence", "bench connector", "bench report", "bench report, scaling"
GOALS: tuple[Goal, ...] = (
    Goal("Connector", "get_num_new_matched_tokens for 32k tokens: p99 <= 1 ms", CONNECTOR,
         _question(1e-3)),
    Goal("Connector", "the same, <= 0.3 ms if it can be", CONNECTOR,
         _question(3e-4)),
    Goal("Connector", "copies at 0.8 of a plain copy, blocks of 64 KiB and more: load", CONNECTOR,
         _worst("connector/copy/", "/load_ratio", 0.8, _ratio, most=False, within=_large_blocks)),
    Goal("Connector", "the same: save", CONNECTOR,
         _worst("connector/copy/", "/save_ratio", 0.8, _ratio, most=False, within=_large_blocks)),
    Goal("Connector", "the same, smaller blocks, load and save", CONNECTOR,
         _worst("connector/copy/", "_ratio", 0.8, _ratio, most=False, within=lambda path: not _large_blocks(path))),
    Goal("Connector", "an engine that saves at 0.97 of one without, decode passes as long as an 8B model's on a GPU: prefill", CONNECTOR,
         _worst("connector/throughput/6 layers/", "prefill/ratio", 0.97, _ratio, most=False)),
    Goal("Connector", "the same: decode", CONNECTOR,
         _worst("connector/throughput/6 layers/", "decode/ratio", 0.97, _ratio, most=False)),
    Goal("Connector", "the same with `tiny`, passes shorter than any real model's: prefill", CONNECTOR,
         _worst("connector/throughput/tiny/", "prefill/ratio", 0.97, _ratio, most=False)),
    Goal("Connector", "the same: decode, `tiny`", CONNECTOR,
         _worst("connector/throughput/tiny/", "decode/ratio", 0.97, _ratio, most=False)),
    Goal("Connector", "loaded KV gives the same log-probabilities: largest difference to the device-warm run is 0.0", SCENARIOS,
         _exact_quality),
    Goal("Evidence", "recall@1 >= 0.99 where text is verbatim", EVIDENCE,
         _recall),
    Goal("Evidence", "recall@1 >= 0.95 where common runs cover a fifth, at <= 1 % false positives", EVIDENCE, _recall_with_threshold),
    Goal("Evidence", "recall >= 0.9 on true paraphrase with the embedding provider", EVIDENCE, _paraphrase),
    Goal("Evidence", "reusable_token_count within 10 % on verbatim text (95th percentile)", EVIDENCE,
         _worst("evidence/", "/token_error_p95", 0.10, _percent, most=True, within=_scenario(*VERBATIM))),
    Goal("Evidence", "within 20 % on edited text and number variants", EVIDENCE,
         _worst("evidence/", "/token_error_p95", 0.20, _percent, most=True, within=_scenario(*EDITED))),
    Goal("Evidence", "edited text flagged as edited in >= 95 %", EVIDENCE, _edited_flag),
    Goal("Evidence", "no segment across a change", EVIDENCE, _wrong_segments),
    Goal("Evidence", "lookup p99 <= 1 ms, 8k tokens, 100,000 donors", SCALING, _largest("hit_p99", 1e3, _us, most=True)),
    Goal("Evidence", "lookup grows no faster than the logarithm of the donors", SCALING, _lookup_growth),
    Goal("Evidence", ">= 100 times faster than SemBlend at equal or better recall", EVIDENCE, _against_semblend),
    Goal("Evidence", "<= 4 KiB a donor", SCALING, _largest("bytes_per_donor", 4_096, lambda v: f"{v:,.0f} bytes", most=True)),
    Goal("Evidence", "add >= 5,000 donors/s", SCALING, _largest("registers_per_second", 5_000, lambda v: f"{v:,.0f}/s", most=False)),
    Goal("Evidence", "no stall > 5 ms while adding, removing, evicting at capacity (thread's own time)", SCALING,
         _largest("longest_own", 5e3, _us, most=True)),
    Goal("Evidence", "50,000 events/s on one core, or what limits it", SCALING, _events),
    Goal("Evidence", "two tenants with the same text never see each other", EVIDENCE,
         _worst("evidence/", "/cross_tenant", 0, lambda v: f"{v:.0f} matches", most=True)),
    Goal("Placement", "added router time p50 <= 1 ms (8k tokens, 10,000 donors, 8 ranks)", "bench router", _router("p50", 1.0)),
    Goal("Placement", "added router time p99 <= 3 ms", "bench router", _router("p99", 3.0)),
    Goal("Placement", "requests/s over the bare Python pass-through >= 0.9", "bench router",
         _worst("router/throughput/", "/ours_over_bare", 0.9, _ratio, most=False)),
    Goal("Placement", "the same over Dynamo's own router, reported beside", "bench router",
         _shown("router/throughput/", "/ours_over_rust")),
    Goal("Placement", "working set twice the device pools: mean TTFT <= 0.7 of Dynamo kv alone, uniform arrivals", SCENARIOS,
         _compared("working_set_uniform", 0.7)),
    Goal("Placement", "the same, bursty arrivals", SCENARIOS,
         _compared("working_set_bursty", 0.7)),
    Goal("Placement", "the same, Mooncake's arrivals", SCENARIOS,
         _compared("working_set_mooncake", 0.7)),
    Goal("Placement", "negative controls: mean TTFT <= 1.02 of Dynamo kv alone", SCENARIOS,
         _compared("all_negative", 1.02)),
    Goal("Placement", "the same, three times as far apart", SCENARIOS,
         _compared("all_unhurried", 1.02)),
    Goal("Placement", "the same, prompts of 8k tokens", SCENARIOS,
         _compared("all_unhurried", 1.02, "long")),
    Goal("Placement", "the same, SmolLM2, prompts of 2k tokens", SCENARIOS,
         _compared("all_negative", 1.02, "language")),
    Goal("Placement", "the same through our router switched off, engines without a connector, reported beside", SCENARIOS, _hop),
    Goal("Placement", "high-load batch: the lookup does not reduce throughput (tokens/s over the same without it >= 0.98)", SCENARIOS,
         _lookup_in_a_batch),
    Goal("Placement", "Mooncake replay: prefill tokens against round robin, Dynamo kv and the oracle", "bench replay", _shown_replay),
)  # fmt: skip
PROVEN_BY_TESTS = (
    "2,000 random schedules of engine and connector in `make test`, a longer run in `make schedules`",
    "faults at every step of a load plan, the peers' own tests, every dialect and layout (`tests/worker_connector`)",
    "two tenants with the same text: a property test that tries to break it (`tests/evidence/test_tenants.py`)",
    "the outcome ledger in any order (`tests/outcome/test_any_order.py`), and a soak of 30 minutes under random kills (`make soak`)",
)
"""Goals that are no figures."""
