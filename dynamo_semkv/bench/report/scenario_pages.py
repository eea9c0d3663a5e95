"""The scenarios' part of the page: the tables of each group, and quality. Pure: figures in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_semkv.bench.report.figures import OURS, RIVAL, reasons
from dynamo_semkv.bench.report.markdown import counts, milliseconds, percent, spread, table
from dynamo_semkv.bench.report.statistics import Figure, Figures

ORDER = ("semkv", "no_lookup", "kv", "kv_connector", "passing", "round_robin", "semblend", "cold")
TITLES = {
    "semkv": "semkv",
    "no_lookup": "semkv without lookup",
    "kv": "Dynamo kv",
    "kv_connector": "Dynamo kv + connector",
    "passing": "router off",
    "round_robin": "round robin",
    "semblend": "semkv with SemBlend",
    "cold": "cold",
}


def pages(found: Mapping[str, Any], figures: Figures) -> str:
    """The whole part. `found`: what `graphs.bench` wrote; `figures`: of all sections."""
    parts = [_group(name, group, figures) for name, group in found["groups"].items()]
    for name, why in found.get("left_out", {}).items():
        parts.append(f"Left out: {TITLES.get(name, name)} ({why}).")
    if found.get("exactness"):
        parts.append(_exactness(found["exactness"]))
    return "\n\n".join(parts)


def _group(name: str, group: Mapping[str, Any], figures: Figures) -> str:
    def of(scenario: str, contender: str, what: str) -> Figure | None:
        return figures.get(f"scenarios/{name}/{scenario}/{contender}/{what}")

    present = {record["contender"] for record in group["records"]}
    contenders = [contender for contender in ORDER if contender in present]
    scenarios = group["scenarios"]
    ours = [contender for contender in contenders if contender in OURS]
    parts = [f"### {group['title']}"]
    pace = f"requests come {group['gap'] * 1e3:.0f} ms apart on average, which is what a cold prompt takes"
    if not any(described["paced"] for described in scenarios.values()):
        pace = "one request at a time"
    parts.append(f"{group['workers']} workers, {group['device_tokens']:,} tokens of device pages in all; {pace}.")
    if group["trouble"]:
        parts.append(f"{len(group['trouble'])} lines of trouble in the logs, the first: `{group['trouble'][0][:200]}`")
    failed = sum(not record["ok"] for record in group["records"])
    repeats = len({record["repeat"] for record in group["records"]})
    times = "measured once" if repeats == 1 else f"{repeats} repeats"
    parts.append(f"{len(group['records']):,} requests, {failed} failed; {times}{_when(group)}.")
    rows = []
    for scenario, described in [*scenarios.items(), *_sums(scenarios)]:
        cells = [milliseconds(of(scenario, contender, "ttft_mean")) for contender in contenders]
        rows.append([described["title"], *cells, spread(of(scenario, "semkv", f"ttft_mean_to_{RIVAL}"))])
    parts.append("Time to first token, mean over the scenario, ms; the last column is paired within each repeat:")
    parts.append(table(["scenario", *(TITLES[c] for c in contenders), "semkv / Dynamo kv"], rows))
    parts.append(
        "By where the prompt's KV came from, median, ms (cold: computed; warm: on the device; loaded: by the "
        "connector):"
    )
    parts.append(_classes(scenarios, of))
    parts.append(
        "What became of the prompts. Cached: the engine's own count of tokens that it did not compute, over all prompt "
        "tokens:"
    )
    parts.append(_funnel(scenarios, contenders, of))
    for contender in ours:
        parts.append(f"{TITLES[contender]}: lookups, loads and declines:")
        parts.append(_routes(group, scenarios, contender, of))
    parts.append(
        "Answers against the cold run's (8 tokens each; token match / ROUGE-L / F1) and prompt tokens served a second. "
        "No model judges the answers: what is the same to the token needs no judge."
    )
    parts.append(_quality(scenarios, contenders, of))
    return "\n\n".join(parts)


def _when(group: Mapping[str, Any]) -> str:
    """When a group was measured, at which commit, and how far its engines gave way; empty for runs that do not say."""
    measured = group.get("measured")
    if measured is None:
        return ""
    return f"; {measured['at']}, commit {measured['commit'] or 'unknown'}, engines at niceness {measured['niceness']}"


def _sums(scenarios: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    titles = {
        "reuse": "all with reuse",
        "negative": "all negative controls",
    }  # of `unhurried` and `load` there is one each
    kinds = {described["kind"] for described in scenarios.values()}
    return [(f"all_{kind}", {"title": f"**{title}**"}) for kind, title in titles.items() if kind in kinds]


def _classes(scenarios: Mapping[str, Any], of: Any) -> str:
    rows = []
    for scenario, described in scenarios.items():
        cells = [
            milliseconds(of(scenario, contender, f"ttft_{what}"))
            for contender, whats in (("semkv", ("cold", "warm", "loaded")), (RIVAL, ("cold", "warm")))
            for what in whats
        ]
        if any(cell != "-" for cell in cells):
            rows.append([described["title"], *cells])
    return table(["scenario", "semkv cold", "semkv warm", "semkv loaded", "Dynamo kv cold", "Dynamo kv warm"], rows)


def _funnel(scenarios: Mapping[str, Any], contenders: list[str], of: Any) -> str:
    head = [f"cached, {TITLES[c]}" for c in contenders if c != "cold"]
    rows = []
    for scenario, described in scenarios.items():
        cached = [percent(of(scenario, c, "cached_share")) for c in contenders if c != "cold"]
        mine = [
            percent(of(scenario, "semkv", w)) for w in ("discovery_only_rate", "placement_rate", "materialized_share")
        ]
        tokens = spread(of(scenario, "semkv", "materialized_tokens"), 1.0, 0)
        rows.append([described["title"], *cached, *mine, tokens])
    return table(["scenario", *head, "discovery only", "placed", "materialized, confirmed", "tokens"], rows)


def _routes(group: Mapping[str, Any], scenarios: Mapping[str, Any], contender: str, of: Any) -> str:
    why = reasons(group)
    rows = []
    for scenario, described in scenarios.items():
        if of(scenario, contender, "placement_rate") is None:
            continue
        cells = [
            milliseconds(of(scenario, contender, w)) for w in ("lookup_p50", "lookup_p99", "load_host", "load_disk")
        ]
        rows.append([described["title"], *cells, counts(why.get(f"{scenario}/{contender}"))])
    head = ["scenario", "lookup p50, ms", "p99", "load from host, ms", "from disk", "not loaded, and why"]
    return table(head, rows)


def _quality(scenarios: Mapping[str, Any], contenders: list[str], of: Any) -> str:
    compared = [c for c in contenders if c != "cold"]
    rows = []
    for scenario, described in scenarios.items():
        likes = []
        for contender in compared:
            scores = [of(scenario, contender, name) for name in ("token_match", "rouge_l", "f1")]
            likes.append(" / ".join(f"{s.median:.3f}" if s is not None else "-" for s in scores))
        rates = [spread(of(scenario, contender, "tokens_per_second"), 1.0, 0) for contender in ("semkv", RIVAL)]
        ratio = spread(of(scenario, "semkv", f"tokens_per_second_to_{RIVAL}"))
        rows.append([described["title"], *likes, *rates, ratio])
    return table(["scenario", *(TITLES[c] for c in compared), "tokens/s, semkv", "Dynamo kv", "ratio"], rows)


def _exactness(rows: list[Mapping[str, Any]]) -> str:
    cells = [
        [
            f"{row['model']}, {row['prompt']}",
            f"{row['tokens']:,}",
            f"{row['loaded_tokens']:,}",
            f"{row['max_difference_loaded_warm']}",
            f"{row['max_difference_loaded_cold']:.2g}",
            f"{row['max_difference_warm_cold']:.2g}",
            " / ".join(f"{row[f'perplexity_{name}']:.4f}" for name in ("cold", "warm", "loaded")),
            "yes" if row["same_tokens"] else "no",
        ]
        for row in rows
    ]
    head = [
        "prompt",
        "tokens",
        "loaded",
        "loaded - warm",
        "loaded - cold",
        "warm - cold",
        "perplexity cold / warm / loaded",
        "same answer",
    ]
    return (
        "### Exact to the last bit\n\nLargest absolute difference of any log-probability of the vocabulary, over 16 "
        "answer tokens; the reference engine in one process. *Aligned*: the prompt ends just behind a chunk, so all "
        "runs compute the same last chunk. *Unaligned*: the cold run adds in another order there, with and without a "
        "connector.\n\n" + table(head, cells)
    )
