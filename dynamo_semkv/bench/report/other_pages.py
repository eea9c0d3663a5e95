"""The parts of the page that come from other benchmarks: connector, evidence side by side, replay, router. Pure:
sections in, Markdown out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dynamo_semkv.bench.report.markdown import number, spread, table
from dynamo_semkv.bench.report.statistics import Figure, Figures


def connector(figures: Figures) -> str:
    """The connector's tables. `figures`: of all sections."""
    rows = []
    for path in _paths(figures, "connector/lookup/", "/p50"):
        tokens, resident, how = path.split("/")[2:5]
        mine = [figures.get(f"{path}/{name}") for name in ("p50", "p99", "own_p50", "own_p99")]
        rows.append(
            [f"{int(tokens):,} tokens, {resident} prompts resident, as {how}", *(spread(f, 1e3, 2) for f in mine)]
        )
    parts = (
        ["`get_num_new_matched_tokens`, ms:", table(["question", "p50", "p99", "own p50", "own p99"], rows)]
        if rows
        else []
    )
    rows = []
    for path in _paths(figures, "connector/copy/", "/load_ratio"):
        device, size, pattern = path.split("/")[2:5]
        mine = [figures.get(f"{path}/{name}") for name in ("plain_gb_per_s", "load_ratio", "save_ratio")]
        rows.append([f"{device}, blocks of {int(size) // 1024} KiB, {pattern}", *(spread(f) for f in mine)])
    if rows:
        parts += [
            "Copies between slab and pages, as a share of a plain copy:",
            table(["copy", "plain, GB/s", "load", "save"], rows),
        ]
    rows = []
    for path in _paths(figures, "connector/throughput/", "/ratio"):
        model, phase = path.split("/")[2:4]
        mine = [figures.get(f"{path}/{name}") for name in ("ratio", "cpu_ratio")]
        rows.append([f"{model}, {phase}", *(spread(f, 1.0, 3) for f in mine)])
    if rows:
        parts += [
            "An engine that saves, over one without a connector:",
            table(["engine", "throughput", "by processor time"], rows),
        ]
    return "\n\n".join(parts) or "Not measured in this run."


def _paths(figures: Figures, start: str, end: str) -> list[str]:
    return [path.removesuffix(end) for path in figures if path.startswith(start) and path.endswith(end)]


def evidence(found: Mapping[str, Any] | None) -> str:
    """The evidence tables. `found`: the section's JSON; None: not measured."""
    if found is None:
        return "Not measured in this run."
    parts = []
    for report in found["reports"]:
        rows = [
            [
                score["scenario"],
                _share(score["true_share"]),
                _share(score["recall_at_1"]),
                _share(score["matched"]),
                _share(score["token_error_p95"]),
                _share(score["edited"]),
                f"{score['wrong_segments']} of {score['segments']}",
            ]
            for score in report["scores"]
        ]
        parts.append(
            f"**{report['tokens']:,} tokens a document**, {report['donors']:,} donors; lookup p50 "
            f"{report['lookup_p50'] * 1e3:.2f} ms, p99 {report['lookup_p99'] * 1e3:.2f} ms; {report['cross_tenant']} "
            f"matches across tenants; negatives share at most {report['worst_hidden_overlap']:.1%} of their word "
            "8-grams with donors"
        )
        head = [
            "scenario",
            "truly shared",
            "recall@1",
            "any match",
            "token error p95",
            "flagged edited",
            "wrong segments",
        ]
        parts.append(table(head, rows))
    for title, standings in _standings(found):
        parts.append(title)
        head = ["right donor first, as decided", *(standing["method"] for standing in standings)]
        rows = [
            [line["scenario"], *(_decimal(standing["lines"][n]["decided"]) for standing in standings)]
            for n, line in enumerate(standings[0]["lines"])
        ]
        rows.append(["negatives accepted", *(f"{s['false_positives']:.1%} of {s['negatives']}" for s in standings)])
        rows.append(["lookup p50 / p99, ms", *(f"{_ms(s['find_p50'])} / {_ms(s['find_p99'])}" for s in standings)])
        rows.append(["adds/s", *(number(s["adds_per_second"], 1) for s in standings)])
        rows.append(["prompts asked, in the time given", *(f"{s['asked']} of {s['of']}" for s in standings)])
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def _standings(found: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    made = [(f"Side by side, {one['tokens']:,} tokens, one thread:", one["standings"]) for one in found["side_by_side"]]
    if found.get("paraphrase"):
        made.append(("True paraphrase, the same verses in two translations:", found["paraphrase"]["standings"]))
    return [(title, standings) for title, standings in made if standings]


def _decimal(value: float | None) -> str:
    """A dash where the method had no time."""
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def replay(found: Mapping[str, Any] | None) -> str:
    """The replay's tables. `found`: the section's JSON; None: not measured."""
    if found is None:
        return "Not measured in this run."
    parts = [
        f"{found['requests']:,} requests, trace: {found['trace']}; `bench replay {found['fleet']}`; a simulation, so "
        "the same every time."
    ]
    for index, title in (
        ("index_sees_host", "Dynamo's index sees the host tier"),
        ("salted", "it does not (`--salted`)"),
    ):
        rows = [
            [
                f"{engine}, {row['policy']}",
                _share(row["confirmed_share"]),
                _share(row["device_share"]),
                number(row["mean_prefill_tokens"], 0),
                number(row["mean_ttft"], 3),
                number(row["p99_ttft"], 2),
                f"{row['regret']:+.1%}",
                number(row["load_spread"], 2),
            ]
            for engine, same in found[index].items()
            for row in same
        ]
        head = [
            "engine, policy",
            "confirmed from host",
            "device",
            "prefill tokens",
            "mean TTFT, s",
            "p99",
            "against the oracle",
            "load spread",
        ]
        parts += [f"{title}:", table(head, rows)]
    return "\n\n".join(parts)


def router(found: Mapping[str, Any] | None, figures: Figures, missing: str | None) -> str:
    """The router's tables. `found`: what `bench router` wrote; `figures`: of all sections; `missing`: why there are
    none."""
    if found is None:
        return f"Not measured in this run{f': {missing}' if missing else ''}."
    of = {path.removeprefix("router/"): figure for path, figure in figures.items() if path.startswith("router/")}
    parts, shown = [], set[str]()
    size = f"{found.get('donors', 0):,} donors, prompts of {found.get('tokens', 0):,} tokens"
    titles = {
        "stages": f"What our router adds to a request by stage, ms; {size}:",
        "scales": "All stages by donors, ms, a value a repeat:",
        "decisions": "A decision by replicas, ms:",
    }
    for place, title in titles.items():
        rows: dict[str, dict[str, Figure]] = {}
        for path in of:
            if path.startswith(f"{place}/"):
                label, _, name = path.removeprefix(f"{place}/").partition("/")
                rows.setdefault(label, {})[name.replace("/", " ")] = of[path]
                shown.add(path)
        if rows:
            names = [name for name in next(iter(rows.values())) if name != "replicas"]
            cells = [[label, *(spread(row.get(name), 1.0, 3) for name in names)] for label, row in rows.items()]
            parts += [title, table([place, *(name.replace("_", " ") for name in names)], cells)]
    for row in found.get("throughput", ()):
        parts += list(_throughput(row, of))
        shown |= {path for path in of if path.startswith(f"throughput/{row['ranks']}/")}
    rest = [
        [path, _plain(figure)]
        for path, figure in of.items()
        if path not in shown and path not in ("donors", "tokens", "requests")
    ]
    if rest:
        parts.append(table(["figure", "value"], rest))
    return "\n\n".join(parts)


def _throughput(row: Mapping[str, Any], of: Mapping[str, Figure]) -> Iterator[str]:
    start = f"throughput/{row['ranks']}"
    titles = {
        "mock": "Dynamo's own router (kv, in the frontend)",
        "bare": "a bare pass-through in Python",
        "ours": "ours",
    }
    yield (
        f"Through the frontend to mock engines of {row['ranks']} ranks, prompts of {row['tokens']:,} tokens, "
        f"{row['concurrency']} at a time, {row['rounds']} rounds in turns. Requests a second over the bare "
        f"pass-through: {row['ours_over_bare']:.2f}; over Dynamo's own router: {row['ours_over_rust']:.2f}; the bare "
        f"pass-through over Dynamo's own: {row['bare_over_rust']:.2f}. Processor time is that of the process that "
        "routes; of Dynamo's own it is the whole frontend, so those two do not compare."
    )
    rows = [
        [titles.get(name, name), *(spread(of.get(f"{start}/contenders/{name}/{what}"), 1.0, 1) for what in _THROUGHPUT)]
        for name in row["contenders"]
    ]
    yield table(["router", "requests/s", "TTFT p50, ms", "processor time, ms a request"], rows)


_THROUGHPUT = ("per_second", "ttft_p50_ms", "processor_ms")


def _plain(figure: Figure) -> str:
    small = abs(figure.median) < 0.1
    return spread(figure, 1.0, 6 if small else 3)
