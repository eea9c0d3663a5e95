"""`dynamo_semkv bench evidence`: the whole labelled workload in one run.

    ours in detail at every length -> side by side with the peers -> paraphrase -> what it costs at 1k, 10k, 100k donors

A part that needs something that is not installed is left out, and the output names what is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from dynamo_semkv.bench import evidence, evidence_cost, side_by_side
from dynamo_semkv.bench.corpus import Words, hidden_overlaps, installed, tokens_of
from dynamo_semkv.bench.encoder_onnx import MODEL_PACKAGE, model_directory, write
from dynamo_semkv.bench.evidence_arguments import MODELLED, add_arguments
from dynamo_semkv.bench.labelled import MAX_HIDDEN_OVERLAP, Case, Donor, build
from dynamo_semkv.bench.paraphrase import FEW_WORDS, pairs, translations, verses
from dynamo_semkv.bench.peers import peers
from dynamo_semkv.bench.side_by_side import Standing
from dynamo_semkv.config.extras import remedy

_REMEDY = escape(remedy("peers"))

NEEDS = {
    "embedding": ("onnxruntime", "usearch"),
    "budgeted": ("onnxruntime", "usearch"),
    "default": ("onnxruntime", "usearch"),
    "minilm": ("onnxruntime",),
    "semblend": ("semblend_core", "rapidfuzz", "sentence_transformers", "torch"),
    "minhash": ("datasketch",),
    "dynamo": ("dynamo",),
}


def run(arguments: argparse.Namespace) -> int:
    """Measures all parts that were asked for; prints tables and, with `--json`, writes the figures. Exit status 0."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    say = Console(stderr=True, highlight=False).print
    figures: dict[str, Any] = {"reports": [], "side_by_side": [], "paraphrase": None, "cost": []}
    for tokens in arguments.tokens:
        size = max(2, arguments.size * 8_192 // max(8_192, tokens) * 9 // 10 if tokens > 8_192 else arguments.size)
        negatives = arguments.negatives if tokens == min(arguments.tokens) else 0
        report = evidence.measure(build(size, tokens, installed(), negatives=negatives), arguments.background)
        figures["reports"].append(asdict(report))
        console.print(evidence.table(report))
        console.print(evidence.summary(report), highlight=False)
    names = _installed(arguments.peers, say)
    with tempfile.TemporaryDirectory() as folder:
        onnx = _model(Path(folder), say) if MODELLED & set(names) else None
        if onnx is None:
            names = [name for name in names if name not in MODELLED]
        for tokens in arguments.peer_tokens if names else ():
            workload = build(arguments.peer_size, tokens, installed())
            made = peers(evidence.OURS, Words(), model_directory(), onnx, names)
            standings = side_by_side.compare(made, workload.donors, workload.cases, say, arguments.peer_seconds)
            figures["side_by_side"].append({"tokens": tokens, "standings": [asdict(s) for s in standings]})
            console.print(
                side_by_side.table(f"Side by side, {tokens} tokens, {len(workload.donors)} donors", standings)
            )
        if names and arguments.pairs:
            figures["paraphrase"] = _paraphrase(arguments, names, onnx, console, say)
    for donors in arguments.donors:
        cost = evidence_cost.measure(donors, arguments.cost_tokens)
        figures["cost"].append(asdict(cost))
        console.print(evidence_cost.show(cost), highlight=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


def paraphrased(count: int, tokens: int) -> tuple[list[Donor], list[Case], float]:
    """Donors, cases and a control. At most `count` donors of the later translation for each of the two sets; prompts of
    the earlier one, one half with a donor and the other without. The third value is the largest share of its word
    8-grams that a prompt without a donor has in common with the donors; a prompt where it exceeds MAX_HIDDEN_OVERLAP is
    no negative. Raises ImportError without the package."""
    later, earlier = (verses(path) for path in translations())
    sets = {
        "paraphrase, 5 to 7 words in a row in common": pairs(tokens, later, earlier, together=FEW_WORDS),
        # There are few such verses, so documents of half the length.
        "paraphrase, never 5 words in a row in common": pairs(tokens // 2, later, earlier, apart=FEW_WORDS),
    }
    donors, cases, others = list[Donor](), list[Case](), list[str]()
    for scenario, found in sets.items():
        made = list(islice(found, 2 * count))
        half = len(made) // 2
        for n, pair in enumerate(made[:half]):
            donor, prompt = Donor(f"{scenario} {n}", tokens_of(pair.donor)), tokens_of(pair.prompt)
            donors.append(donor)
            cases.append(Case(scenario, prompt, (donor.donor_id,), len(prompt)))
        others += [pair.prompt for pair in made[half:]]
    known = [Words().text(donor.tokens) for donor in donors]
    hidden = dict(zip(others, hidden_overlaps(others, known), strict=True))
    negatives = [text for text in others if hidden[text] <= MAX_HIDDEN_OVERLAP]
    cases += [Case("negative", tokens_of(text)) for text in negatives]
    return donors, cases, max((hidden[text] for text in negatives), default=0.0)


def _paraphrase(
    arguments: argparse.Namespace, names: Sequence[str], onnx: Path | None, console: Console, say: Any
) -> dict[str, Any] | None:
    try:
        donors, cases, hidden = paraphrased(arguments.pairs, 2_048)
    except ImportError as error:
        say(escape(f"no paraphrase: {error}"))
        return None
    made = peers(evidence.OURS, Words(), model_directory(), onnx, names)
    standings: list[Standing] = side_by_side.compare(made, donors, cases, say, arguments.peer_seconds)
    title = (
        f"Paraphrase: the same verses by two groups of translators, {len(donors)} donors; negatives share at most "
        f"{hidden:.1%} of their word 8-grams with donors"
    )
    console.print(side_by_side.table(title, standings))
    return {"hidden_overlap": hidden, "standings": [asdict(standing) for standing in standings]}


def _installed(names: Sequence[str], say: Any) -> list[str]:
    found = []
    for name in names:
        missing = [module for module in NEEDS.get(name, ()) if find_spec(module) is None]
        if missing:
            say(f"left out: {name}, for want of {', '.join(missing)} ({_REMEDY})")
        else:
            found.append(name)
    return found


def _model(folder: Path, say: Any) -> Path | None:
    """The encoder in ONNX with int8 weights, written to `folder`; None where the model or `onnx` is missing."""
    source = model_directory()
    if source is None or find_spec("onnx") is None or find_spec("onnxruntime") is None:
        without = ", ".join(sorted(MODELLED))
        say(f"left out: {without}, for want of {MODEL_PACKAGE}, onnx or onnxruntime ({_REMEDY})")
        return None
    write(source, folder / "model.onnx", int8=True)
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2, with the reason, for what cannot be measured here."""
    parser = argparse.ArgumentParser(
        prog="dynamo_semkv bench evidence",
        description="Donors and prompts of real text with known truth, through our providers and other methods.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except ImportError as error:
        why = f"{error}; it needs the extra `router`, and `peers` for the other methods"
    except ValueError as error:  # the installed text does not hold as many documents as were asked for
        why = str(error)
    print(f"bench evidence: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
