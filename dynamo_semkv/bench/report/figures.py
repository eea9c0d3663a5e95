"""Turns the scenarios' records into figures, one value per repeat: what the RFC asks to be reported, per scenario and
contender.

    figures(group) -> {"working_set_uniform/semkv/ttft_mean": Figure, ...}
    reasons(group) -> why KV was not loaded, counted

`group` is what `graphs.bench` wrote. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from dynamo_semkv.bench.report.statistics import Figure, Figures, paired, quantile
from dynamo_semkv.bench.table import unmaterialized

Record = Mapping[str, Any]
RIVAL = "kv"
"""The contender that ratios are taken against: Dynamo's KV router alone."""
OURS = ("semkv", "semblend")
COLD_SHARE = 0.1
WARM_SHARE = 0.5
"""A prompt of which less than COLD_SHARE was reused counts as cold, one of which at least WARM_SHARE was as warm; those
in between as neither."""


def where_from(record: Record) -> str:
    """`cold`, `warm` (the device), `loaded` (the connector) or `mixed`; by our router where it recorded the route, else
    by the engine's own count."""
    route = record["route"]
    if route is not None:
        return str(route["ttft_class"] or "mixed")
    share = record["cached_tokens"] / max(1, record["prompt_tokens"])
    return "cold" if share < COLD_SHARE else "warm" if share >= WARM_SHARE else "mixed"


def _ttfts(records: Iterable[Record]) -> list[float]:
    return [record["ttft"] for record in records if record["ok"] and record["ttft"] is not None]


def _of_class(name: str) -> Callable[[Sequence[Record]], float | None]:
    def value(records: Sequence[Record]) -> float | None:
        times = _ttfts(r for r in records if where_from(r) == name)
        return median(times) if times else None

    return value


def _of_phase(name: str) -> Callable[[Sequence[Record]], float | None]:
    def value(records: Sequence[Record]) -> float | None:
        times = _ttfts(r for r in records if r["phase"] == name)
        return fmean(times) if times else None

    return value


def _mean_ttft(records: Sequence[Record]) -> float | None:
    times = _ttfts(records)
    return fmean(times) if times else None


def _p99_ttft(records: Sequence[Record]) -> float | None:
    times = _ttfts(records)
    return quantile(times, 0.99) if times else None


def _seconds(records: Sequence[Record]) -> float:
    """Duration of all passes together."""
    return sum({record["turn"]: float(record["pass_seconds"]) for record in records}.values())


def _tokens_per_second(records: Sequence[Record]) -> float | None:
    return float(sum(record["prompt_tokens"] for record in records)) / _seconds(records)


def _share(part: Callable[[Record], float]) -> Callable[[Sequence[Record]], float | None]:
    """A measure as a share of the prompt tokens."""

    def value(records: Sequence[Record]) -> float | None:
        total = sum(record["prompt_tokens"] for record in records)
        return sum(part(record) for record in records) / total if total else None

    return value


def _routes(records: Sequence[Record]) -> list[Mapping[str, Any]]:
    return [record["route"] for record in records if record["route"] is not None]


def _of_routes(what: Callable[[Sequence[Mapping[str, Any]]], float]) -> Callable[[Sequence[Record]], float | None]:
    def value(records: Sequence[Record]) -> float | None:
        routes = _routes(records)
        return what(routes) if routes else None

    return value


def _lookup(share: float) -> Callable[[Sequence[Record]], float | None]:
    def value(records: Sequence[Record]) -> float | None:
        times = [route["lookup_seconds"] for route in _routes(records) if route["lookup"] != "skipped"]
        return quantile(times, share) if times else None

    return value


def _load(tier: str) -> Callable[[Sequence[Record]], float | None]:
    def value(records: Sequence[Record]) -> float | None:
        times = [
            r["load_seconds"] for r in _routes(records) if r["tier"] == tier and r["confirmed"] and r["load_seconds"]
        ]
        return median(times) if times else None

    return value


def _likeness(name: str) -> Callable[[Sequence[Record]], float | None]:
    def value(records: Sequence[Record]) -> float | None:
        scores = [record["likeness"][name] for record in records if record["likeness"] is not None]
        return fmean(scores) if scores else None

    return value


def _discovered(route: Mapping[str, Any]) -> bool:
    return route["lookup"] == "hit" and not route["placed"]


MEASURES: dict[str, tuple[str, str, Callable[[Sequence[Record]], float | None]]] = {
    "ttft_mean": ("s", "lower", _mean_ttft),
    "ttft_p99": ("s", "lower", _p99_ttft),
    "ttft_cold": ("s", "lower", _of_class("cold")),
    "ttft_warm": ("s", "lower", _of_class("warm")),
    "ttft_loaded": ("s", "lower", _of_class("loaded")),
    "ttft_first": ("s", "lower", _of_phase("first")),
    "ttft_again": ("s", "lower", _of_phase("again")),
    "ttft_after_eviction": ("s", "lower", _of_phase("after_eviction")),
    "tokens_per_second": ("tokens/s", "higher", _tokens_per_second),
    "cached_share": ("share", "higher", _share(lambda r: r["cached_tokens"])),
    "discovery_only_rate": ("share", "", _of_routes(lambda routes: fmean(_discovered(r) for r in routes))),
    "placement_rate": ("share", "", _of_routes(lambda routes: fmean(r["placed"] > 0 for r in routes))),
    "materialized_share": ("share", "higher", _share(lambda r: (r["route"] or {}).get("confirmed", 0))),
    "materialized_tokens": ("tokens", "higher", _of_routes(lambda routes: float(sum(r["confirmed"] for r in routes)))),
    "declined_rate": ("share", "", _of_routes(lambda routes: fmean(_unused(r) is not None for r in routes))),
    "lookup_p50": ("s", "lower", _lookup(0.5)),
    "lookup_p99": ("s", "lower", _lookup(0.99)),
    "load_host": ("s", "lower", _load("host_pinned")),
    "load_disk": ("s", "lower", _load("disk")),
    "token_match": ("share", "higher", _likeness("token_match")),
    "rouge_l": ("share", "higher", _likeness("rouge_l")),
    "f1": ("share", "higher", _likeness("f1")),
    "failed": ("requests", "lower", lambda records: float(sum(not r["ok"] for r in records))),
}
"""Name -> unit, which direction is good, and the value of one repeat (None: the repeat had nothing of the kind)."""
OURS_ONLY = frozenset({"materialized_share"})
"""Measures that contenders without our router do not have: they would show a zero that was not measured."""


def figures(group: Mapping[str, Any]) -> Figures:
    """The figures per scenario and contender; a figure is there only if every repeat has a value. Ratios to RIVAL
    follow as `.../ttft_mean_to_kv`, ours also to `no_lookup` and to the `best` peer of each repeat."""
    found: Figures = {}
    for scenario in group["scenarios"]:
        mine = [record for record in group["records"] if record["scenario"] == scenario]
        for contender in dict.fromkeys(record["contender"] for record in mine):
            _add(found, f"{scenario}/{contender}", [r for r in mine if r["contender"] == contender], contender)
    for kind in sorted({described["kind"] for described in group["scenarios"].values()}):
        names = {name for name, described in group["scenarios"].items() if described["kind"] == kind}
        mine = [record for record in group["records"] if record["scenario"] in names]
        for contender in ("semkv", RIVAL):
            # Only scenarios that both were sent, so that a ratio compares like with like.
            both = names & {r["scenario"] for r in mine if r["contender"] == RIVAL}
            part = [r for r in mine if r["contender"] == contender and r["scenario"] in both]
            if part:
                _add(found, f"all_{kind}/{contender}", part, contender)
        found |= {f"all_{kind}/semkv/{name}": figure for name, figure in _request_by_request(mine).items()}
    return found | _ratios(found)


def _request_by_request(records: Sequence[Record]) -> Figures:
    """Medians over the same requests, which a few slow ones do not move: our time to first token minus the rival's
    (where nothing is reused, the cost of our router), and divided by it."""
    times: dict[str, dict[tuple[Any, ...], float]] = {"semkv": {}, RIVAL: {}}
    for record in records:
        if record["contender"] in times and record["ok"] and record["ttft"]:
            key = (record["repeat"], record["scenario"], record["turn"], record["number"])
            times[record["contender"]][key] = record["ttft"]
    pairs: dict[int, list[tuple[float, float]]] = {}
    for both in sorted(times["semkv"].keys() & times[RIVAL].keys()):
        pairs.setdefault(both[0], []).append((times["semkv"][both], times[RIVAL][both]))
    if not pairs:
        return {}
    beyond = tuple(median(ours - theirs for ours, theirs in pairs[repeat]) for repeat in sorted(pairs))
    over = tuple(median(ours / theirs for ours, theirs in pairs[repeat]) for repeat in sorted(pairs))
    return {
        f"ttft_beyond_{RIVAL}": Figure("s", beyond, "lower"),
        f"ttft_request_to_{RIVAL}": Figure("ratio", over, "lower"),
    }


def _add(found: Figures, path: str, records: Sequence[Record], contender: str) -> None:
    repeats = sorted({record["repeat"] for record in records})
    for name, (unit, better, value) in MEASURES.items():
        if name in OURS_ONLY and contender not in OURS:
            continue
        values = [value([r for r in records if r["repeat"] == repeat]) for repeat in repeats]
        known = [v for v in values if v is not None]
        if len(known) == len(values) and known:
            found[f"{path}/{name}"] = Figure(unit, tuple(float(v) for v in known), better)


PEERS = (RIVAL, "kv_connector", "round_robin")
"""What a user could run instead of our router."""


def _ratios(found: Figures) -> Figures:
    ratios: Figures = {}
    for path, figure in found.items():
        scenario, contender, name = path.split("/")
        if name not in ("ttft_mean", "ttft_again", "tokens_per_second"):
            continue
        for other in (RIVAL, *(("no_lookup",) if contender == "semkv" else ())):
            theirs = found.get(f"{scenario}/{other}/{name}")
            if contender == other or theirs is None:
                continue
            if len(theirs.values) == len(figure.values) and all(theirs.values):
                ratios[f"{path}_to_{other}"] = paired(figure, theirs)
        if contender == "semkv" and name == "ttft_mean" and (best := _best_peer(found, scenario, len(figure.values))):
            ratios[f"{path}_to_best"] = paired(figure, best)
    return ratios


def _best_peer(found: Figures, scenario: str, repeats: int) -> Figure | None:
    """The lowest mean time to first token of any peer, in each repeat; None where no peer was measured in all."""
    peers = [found.get(f"{scenario}/{peer}/ttft_mean") for peer in PEERS]
    values = [peer.values for peer in peers if peer is not None and len(peer.values) == repeats and all(peer.values)]
    return Figure("s", tuple(min(each) for each in zip(*values, strict=True)), "lower") if values else None


def _unused(route: Mapping[str, Any]) -> str | None:
    return unmaterialized(route["outcome"], route["reason"], route["placed"])


def reasons(group: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """`scenario/contender` -> reason why nothing materialized -> requests, over all repeats."""
    found: dict[str, Counter[str]] = {}
    for record in group["records"]:
        if record["route"] is not None and (why := _unused(record["route"])) is not None:
            found.setdefault(f"{record['scenario']}/{record['contender']}", Counter())[why] += 1
    return {path: dict(counted.most_common()) for path, counted in found.items()}
