"""The arguments of `bench evidence`, in a module that imports nothing that is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

NAMES = ("fingerprint", "embedding", "budgeted", "default", "semblend", "minilm", "minhash", "dynamo")
MODELLED = frozenset({"embedding", "budgeted", "default", "semblend", "minilm"})
"""Methods that need the sentence encoder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the parser."""
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[2_048, 8_192, 16_384, 32_768], help="tokens a document"
    )
    parser.add_argument("--size", type=int, default=40, help="donors a scenario at up to 8k tokens, fewer beyond (40)")
    parser.add_argument(
        "--negatives", type=int, default=400, help="negative controls of the shortest documents, at least (400)"
    )
    parser.add_argument("--background", type=int, default=2_000, help="donors of random tokens besides (2000)")
    parser.add_argument("--peers", nargs="*", default=list(NAMES), choices=NAMES, help="methods side by side (all)")
    parser.add_argument(
        "--peer-tokens", type=int, nargs="*", default=[2_048], help="tokens a document for the peers (2048)"
    )
    parser.add_argument("--peer-size", type=int, default=12, help="donors a scenario for the peers (12)")
    parser.add_argument(
        "--peer-seconds",
        type=float,
        default=60.0,
        help="for a method's donors, and again for its prompts; what was cut is said (60)",
    )
    parser.add_argument("--pairs", type=int, default=24, help="paraphrased documents at most (24)")
    parser.add_argument("--donors", type=int, nargs="*", default=[1_000, 10_000, 100_000], help="for what it costs")
    parser.add_argument("--cost-tokens", type=int, default=8_192, help="tokens a document for what it costs (8192)")
    parser.add_argument("--json", type=Path, help="write all figures to this file as well")
