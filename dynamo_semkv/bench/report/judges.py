"""From figures to verdicts: one judge per kind of promise. A judge takes all figures and returns what was measured, and
whether that keeps the promise.

The worst repeat decides, not the median of several. Where a bound needs more than was measured (donors, negative
controls), the figure is shown and nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_semkv.bench.report.statistics import Figure, Figures, growth, upper_bound
from dynamo_semkv.config.evidence import EvidenceConfig, FingerprintConfig

VERBATIM = ("other instruction", "reordered chunks", "5 of 10 chunks shared", "sibling", "template")
EDITED = ("1 in", "numbers changed")
MIN_SHARED = 0.2
LEAST_SHARE = FingerprintConfig().min_overlap_share
GOAL_DONORS = (10_000, 100_000)
"""Judged at both: a cost that is fine with many donors may be too high with few."""
NO_REUSE_OR_ITS_OWN_GOAL = ("working_set", "high_load", "negative", "tenants", "all_")
"""Prefixes of the scenarios and sums in which nothing is sent twice, or that have a goal of their own."""
NEGATIVES = 400
"""With fewer, a false positive rate of 1 % cannot be shown: none in 300 leaves one in 100 possible (`upper_bound`)."""
FALSE_POSITIVES = 0.01
DEADLINE_MS = EvidenceConfig().deadline_ms


@dataclass(frozen=True)
class Measured:
    """What a judge found, as text for the page. `met` None: shown without a threshold."""

    figure: str
    met: bool | None
    note: str = ""


Judge = Callable[[Figures], Measured | None]
"""Returns None where the run did not measure the figure."""


def matching(figures: Figures, start: str, end: str) -> dict[str, Figure]:
    """The figures whose path starts and ends so."""
    return {path: figure for path, figure in figures.items() if path.startswith(start) and path.endswith(end)}


def worst(
    start: str,
    end: str,
    limit: float,
    show: Callable[[float], str],
    *,
    most: bool,
    within: Callable[[str], bool] = lambda path: True,
) -> Judge:
    """A judge of the worst repeat of all figures that match; `most`: the limit is the most that is allowed, else the
    least."""

    def judge(figures: Figures) -> Measured | None:
        found = {path: f.worst(most=most) for path, f in matching(figures, start, end).items() if within(path)}
        if not found:
            return None
        path = (max if most else min)(found, key=lambda one: found[one])
        value = found[path]
        where = path.removeprefix(start).removesuffix(end).strip("/")
        return Measured(show(value), value <= limit if most else value >= limit, where)

    return judge


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.2f} ms"


def us(micros: float) -> str:
    """Microseconds as milliseconds."""
    return f"{micros / 1e3:.2f} ms"


def ratio(value: float) -> str:
    """A ratio with three digits after the point."""
    return f"{value:.3f}"


def rate(value: float) -> str:
    """Events a second."""
    return f"{value:,.0f}/s"


def percent(value: float) -> str:
    """A share in percent."""
    return f"{value:.1%}"


def scenario(*names: str) -> Callable[[str], bool]:
    """A filter for paths that contain one of the names."""
    return lambda path: any(name in path for name in names)


def large_blocks(path: str) -> bool:
    """Whether a path of `connector/copy` is about blocks of 64 KiB or more."""
    return int(path.split("/")[3]) >= 64 * 1024


def recall(figures: Figures) -> Measured | None:
    """Judges verbatim scenarios. Those that share less than the provider is set to look for are named, and do not
    count."""
    found: dict[str, float] = {}
    below: dict[str, float] = {}
    for path, figure in matching(figures, "evidence/", "/recall_at_1").items():
        share = figures.get(path.replace("/recall_at_1", "/true_share"))
        if share is not None and scenario(*VERBATIM)(path):
            where = path.removeprefix("evidence/").removesuffix("/recall_at_1")
            (found if share.median >= LEAST_SHARE else below)[where] = figure.low
    if not found:
        return None
    worst = min(found, key=lambda one: found[one])
    note = worst + "".join(
        f"; not counted, shares less than {LEAST_SHARE:.0%}: {one} {value:.3f}" for one, value in below.items()
    )
    return Measured(ratio(found[worst]), found[worst] >= 0.99, note)


def edited_flag(figures: Figures) -> Measured | None:
    """Judges the share of edited matches that are flagged, by the worst scenario."""
    found = [f.low for path, f in matching(figures, "evidence/", "/edited").items() if scenario(*EDITED)(path)]
    return Measured(percent(min(found)), min(found) >= 0.95, "the worst scenario") if found else None


def wrong_segments(figures: Figures) -> Measured | None:
    """Judges that no segment of any match differs between prompt and donor."""
    wrong = matching(figures, "evidence/", "/wrong_segments")
    if not wrong:
        return None
    total = sum(f.median for f in matching(figures, "evidence/", "/segments").values())
    count = sum(f.high for f in wrong.values())
    return Measured(f"{count:.0f} of {total:.0f}", count == 0)


def recall_with_threshold(figures: Figures) -> Measured | None:
    """Judges scenarios whose true common tokens make up a fifth, at the false positive rate that the negatives of all
    lengths leave possible."""
    recalls = []
    for path, figure in matching(figures, "evidence/", "/recall_at_1").items():
        share = figures.get(path.replace("/recall_at_1", "/true_share"))
        if share is not None and share.median >= MIN_SHARED:
            recalls.append(figure.low)
    asked, false = 0, 0
    for path, figure in matching(figures, "evidence/", "/negative/matched").items():
        cases = figures.get(path.replace("/matched", "/cases"))
        # The other methods have negatives of their own.
        if cases is not None and path.split("/")[1].isdigit():
            asked += round(cases.low)
            false += round(figure.high * cases.low)
    if not recalls or not asked:
        return None
    most = upper_bound(false, asked)
    note = f"the worst scenario; {false} false of {asked} negatives, so at most {most:.1%}"
    if asked < NEGATIVES:
        return Measured(ratio(min(recalls)), None, f"{note}; {NEGATIVES} are needed")
    return Measured(ratio(min(recalls)), min(recalls) >= 0.95 and most <= FALSE_POSITIVES, note)


def paraphrase(figures: Figures) -> Measured | None:
    """Judges the recall within the default deadline; the note says what more time finds."""

    def of(method: str) -> dict[str, float]:
        found = matching(figures, f"evidence/paraphrase/{method}/", "/decided").items()
        return {path.split("/")[-2].partition(", ")[2]: f.low for path, f in found if "/negative/" not in path}

    found = of("default")
    if not found:
        return None
    text = "; ".join(f"{name} {value:.2f}" for name, value in found.items())
    more = [
        f"{words} {min(values.values()):.2f}"
        for method, words in (
            ("budgeted", "with the provider's own budget, deadline raised"),
            ("embedding", "with a second"),
        )
        if (values := of(method))
    ]
    return Measured(text, min(found.values()) >= 0.9, "; ".join(more))


def against_semblend(figures: Figures) -> Measured | None:
    """Judges the speed, our slowest repeat against their fastest, and the recall over the scenarios that both were
    asked about."""
    speed = {path.split("/")[2]: f for path, f in matching(figures, "evidence/peers", "/find_p50").items()}
    ours, theirs = (next((n for n in speed if word in n.lower()), None) for word in ("fingerprint", "semblend"))
    if ours is None or theirs is None:
        return None
    slow, fast = speed[ours].high, speed[theirs].low
    shares: list[tuple[float, float]] = []
    for path, figure in matching(figures, "evidence/peers", "/decided").items():
        other = figures.get(path.replace(f"/{ours}/", f"/{theirs}/"))
        if f"/{ours}/" in path and other is not None and "negative" not in path:
            shares.append((figure.low, other.high))
    if not shares:
        return Measured(f"{fast / slow:,.0f} times ({ms(slow)} against {ms(fast)})", None, "recall was not compared")
    mine, his = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    text = f"{fast / slow:,.0f} times ({ms(slow)} against {ms(fast)}), recall {mine:.2f} against {his:.2f}"
    return Measured(text, fast / slow >= 100 and mine >= his)


def at_scale(names: tuple[str, ...], limit: float, show: Callable[[float], str], *, most: bool) -> Judge:
    """A judge of the worst of the named figures at every number of donors that the goal names; when one is missing
    nothing is claimed."""

    def judge(figures: Figures) -> Measured | None:
        found = {
            (donors, name): figure.worst(most=most)
            for donors in GOAL_DONORS
            for name in names
            if (figure := figures.get(f"scaling/donors/{donors}/{name}")) is not None
        }
        if not found:
            return None
        worst = (max if most else min)(found, key=lambda one: found[one])
        value, (donors, name) = found[worst], worst
        note = f"{donors:,} donors" + (f", {name.removesuffix('_per_second')}" if len(names) > 1 else "")
        complete = len(found) == len(GOAL_DONORS) * len(names)
        return Measured(show(value), (value <= limit if most else value >= limit) if complete else None, note)

    return judge


def lookup_growth(figures: Figures) -> Measured | None:
    """Judges the exponent of the lookup's growth against that of the logarithm over the same range."""
    found = matching(figures, "scaling/donors/", "/hit_p50")
    points = sorted((int(path.split("/")[2]), figure) for path, figure in found.items())
    exponent = growth([x for x, _ in points], [figure.high for _, figure in points])
    if exponent is None:
        return None
    least, most = points[0][0], points[-1][0]
    # The logarithm's exponent over this range: log(100,000) / log(1,000) = 1.67 in two decades is 0.11.
    allowed = math.log(math.log(most) / math.log(least)) / math.log(most / least)
    return Measured(f"exponent {exponent:.2f}", exponent <= allowed, f"{least:,} to {most:,} donors, median of hits")


def compared(scenario: str, limit: float, group: str = "rfc") -> Judge:
    """A judge of our mean time to first token over Dynamo's in one scenario, by the worst repeat."""

    def judge(figures: Figures) -> Measured | None:
        figure = figures.get(f"scenarios/{group}/{scenario}/semkv/ttft_mean_to_kv")
        if figure is None:
            return None
        note = f"the worst of {len(figure.values)} repeats, median {figure.median:.2f}"
        by_request = figures.get(f"scenarios/{group}/{scenario}/semkv/ttft_request_to_kv")
        if by_request is not None:
            note += f"; of the same requests, median {by_request.median:.2f}"
        return Measured(f"{figure.high:.2f}", figure.high <= limit, note)

    return judge


def over_the_best_peer(scenarios: Sequence[str], limit: float, group: str = "gpu") -> Judge:
    """A judge of our mean time to first token over the best peer's of each repeat: the worst repeat of the worst
    scenario."""

    def judge(figures: Figures) -> Measured | None:
        found = {
            scenario: figure
            for scenario in scenarios
            if (figure := figures.get(f"scenarios/{group}/{scenario}/semkv/ttft_mean_to_best")) is not None
        }
        if len(found) < len(scenarios):
            return None
        worst = max(found, key=lambda one: found[one].high)
        note = f"{worst}; medians " + ", ".join(f"{name} {figure.median:.2f}" for name, figure in found.items())
        return Measured(f"{found[worst].high:.2f}", found[worst].high <= limit, note)

    return judge


def beyond_the_working_set(limit: float) -> Judge:
    """A judge of the worst scenario, over all groups, in which something was sent before."""

    def judge(figures: Figures) -> Measured | None:
        found = {
            "/".join(path.split("/")[1:3]): figure.high
            for path, figure in matching(figures, "scenarios/", "/semkv/ttft_mean_to_kv").items()
            if path.split("/")[1] != "gpu"  # has goals of its own
            if not path.split("/")[2].startswith(NO_REUSE_OR_ITS_OWN_GOAL)
        }
        if not found:
            return None
        worst = max(found, key=lambda one: found[one])
        missed = sum(value > limit for value in found.values())
        return Measured(f"{found[worst]:.2f}", not missed, f"{worst}; {missed} of {len(found)} scenarios above")

    return judge


def lookup_in_a_batch(figures: Figures) -> Measured | None:
    """Judges a batch where no two prompts are alike, so a lookup can only cost."""
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
    note = (
        f"the worst of {len(figure.values)} repeats, median {figure.median:.2f}; over Dynamo kv: {', '.join(over_kv)}"
    )
    return Measured(f"{figure.low:.2f}", figure.low >= 0.98, note)


def hop(figures: Figures) -> Measured | None:
    """Shows the cost of a router that decides nothing, where nothing can be reused."""
    start, end = "scenarios/rfc/", "/passing/ttft_mean_to_kv"
    found = matching(figures, start, end)
    texts = [f"{path.removeprefix(start).removesuffix(end)} {figure.median:.2f}" for path, figure in found.items()]
    return Measured(", ".join(texts), None) if texts else None


def question(limit: float) -> Judge:
    """A judge of the p99 at 32k tokens, by the slower of the two numbers of resident prompts."""

    def judge(figures: Figures) -> Measured | None:
        found = {path: f.high for path, f in matching(figures, "connector/lookup/32768/", "array/p99").items()}
        if not found:
            return None
        path = max(found, key=lambda one: found[one])
        own = figures.get(path.replace("/p99", "/own_p99"))
        note = f"{path.split('/')[3]} prompts resident"
        note += "" if own is None else f"; {ms(own.median)} of its own processor time"
        return Measured(ms(found[path]), found[path] <= limit, note)

    return judge


def shown_at_scale(name: str, show: Callable[[float], str]) -> Judge:
    """Shows a figure at each number of donors, without a threshold."""

    def judge(figures: Figures) -> Measured | None:
        found = {n: figures.get(f"scaling/donors/{n}/{name}") for n in GOAL_DONORS}
        text = ", ".join(f"{n:,} donors {show(figure.high)}" for n, figure in found.items() if figure is not None)
        return Measured(text, None) if text else None

    return judge


def exact_quality(figures: Figures) -> Measured | None:
    """Judges that loaded KV gives the same log-probabilities as the device's own."""
    found = matching(figures, "scenarios/exactness/", "/max_difference_loaded_warm")
    aligned = matching(figures, "scenarios/exactness/", "aligned/max_difference_loaded_cold")
    if not found:
        return None
    worst = max(f.high for f in found.values())
    cold = ", ".join(f"{path.split('/')[3]} {f.median:.1e}" for path, f in aligned.items())
    return Measured(f"{worst:.1f}", worst == 0.0, f"to the cold run: {cold}")


def router(quantile: str, limit_ms: float) -> Judge:
    """A judge of the worst repeat at each number of donors that the goal names."""

    def judge(figures: Figures) -> Measured | None:
        path = "router/scales/{}/{}_" + quantile
        found = {n: f.high for n in GOAL_DONORS if (f := figures.get(path.format(n, "wall"))) is not None}
        if not found:
            return None
        donors = max(found, key=lambda one: found[one])
        own = figures.get(path.format(donors, "own"))
        note = f"{donors:,} donors; without Dynamo's own part"
        note += "" if own is None else f"; {own.high:.2f} ms of processor time"
        met = found[donors] <= limit_ms if len(found) == len(GOAL_DONORS) else None
        return Measured(f"{found[donors]:.2f} ms", met, note)

    return judge


def shown(start: str, end: str) -> Judge:
    """Shows the medians of all matching figures, without a threshold."""

    def judge(figures: Figures) -> Measured | None:
        found = matching(figures, start, end)
        return Measured(", ".join(f"{figure.median:.2f}" for figure in found.values()), None) if found else None

    return judge


def shown_replay(figures: Figures) -> Measured | None:
    """Shows the prefill tokens per request of each policy, without a threshold."""
    start = "replay/salted/materializes/"
    found = matching(figures, start, "/mean_prefill_tokens")
    if not found:
        return None
    text = ", ".join(f"{path.split('/')[3]} {figure.median:,.0f}" for path, figure in found.items())
    return Measured(text, None, "prefill tokens a request; Dynamo's index does not see the host tier")
