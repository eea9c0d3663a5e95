"""Every goal of the project as one row: what was promised, the figure, where it comes from, and whether it is met
(judges.py).

A goal whose section was not measured is marked so: it is neither met nor missed.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_semkv.bench.report import judges
from dynamo_semkv.bench.report.judges import DEADLINE_MS, EDITED, VERBATIM, Judge, Measured
from dynamo_semkv.bench.report.statistics import Figures


@dataclass(frozen=True)
class Goal:
    """One promise, and how it is judged."""

    part: str
    """`Connector`, `Evidence` or `Placement`."""
    text: str
    source: str
    """The command whose section has the figure."""
    judge: Judge


@dataclass(frozen=True)
class Verdict:
    """A goal with its figure in one run; `measured` None: its section was not measured."""

    goal: Goal
    measured: Measured | None

    @property
    def word(self) -> str:
        """The cell of the page: `yes`, `**no**`, `shown` (no threshold) or `not measured`."""
        if self.measured is None:
            return "not measured"
        return "shown" if self.measured.met is None else "yes" if self.measured.met else "**no**"


def verdicts(figures: Figures) -> list[Verdict]:
    """A verdict on every goal, in their order."""
    return [Verdict(goal, goal.judge(figures)) for goal in GOALS]


EVIDENCE, CONNECTOR, SCENARIOS, SCALING = "bench evidence", "bench connector", "bench report", "bench report, scaling"
GOALS: tuple[Goal, ...] = (
    Goal("Connector", "get_num_new_matched_tokens for 32k tokens: p99 <= 1 ms", CONNECTOR,
         judges.question(1e-3)),
    Goal("Connector", "the same, <= 0.3 ms if it can be", CONNECTOR,
         judges.question(3e-4)),
    Goal("Connector", "copies at 0.8 of a plain copy, blocks of 64 KiB and more: load", CONNECTOR,
         judges.worst("connector/copy/", "/load_ratio", 0.8, judges.ratio, most=False, within=judges.large_blocks)),
    Goal("Connector", "the same: save", CONNECTOR,
         judges.worst("connector/copy/", "/save_ratio", 0.8, judges.ratio, most=False, within=judges.large_blocks)),
    Goal("Connector", "the same, smaller blocks, load and save", CONNECTOR,
         judges.worst("connector/copy/", "_ratio", 0.8, judges.ratio, most=False, within=lambda path: not judges.large_blocks(path))),
    Goal("Connector", "an engine that saves at 0.97 of one without, decode passes as long as an 8B model's on a GPU: prefill", CONNECTOR,
         judges.worst("connector/throughput/6 layers/", "prefill/ratio", 0.97, judges.ratio, most=False)),
    Goal("Connector", "the same: decode", CONNECTOR,
         judges.worst("connector/throughput/6 layers/", "decode/ratio", 0.97, judges.ratio, most=False)),
    Goal("Connector", "the same with `tiny`, passes shorter than any real model's: prefill", CONNECTOR,
         judges.worst("connector/throughput/tiny/", "prefill/ratio", 0.97, judges.ratio, most=False)),
    Goal("Connector", "the same: decode, `tiny`", CONNECTOR,
         judges.worst("connector/throughput/tiny/", "decode/ratio", 0.97, judges.ratio, most=False)),
    Goal("Connector", "loaded KV gives the same log-probabilities: largest difference to the device-warm run is 0.0", SCENARIOS,
         judges.exact_quality),
    Goal("Evidence", "recall@1 >= 0.99 where text is verbatim", EVIDENCE,
         judges.recall),
    Goal("Evidence", "recall@1 >= 0.95 where common runs cover a fifth, at <= 1 % false positives", EVIDENCE, judges.recall_with_threshold),
    Goal("Evidence", f"recall >= 0.9 on true paraphrase with the embedding provider, within the default deadline of {DEADLINE_MS:g} ms",
         EVIDENCE, judges.paraphrase),
    Goal("Evidence", "reusable_token_count within 10 % on verbatim text (95th percentile)", EVIDENCE,
         judges.worst("evidence/", "/token_error_p95", 0.10, judges.percent, most=True, within=judges.scenario(*VERBATIM))),
    Goal("Evidence", "within 20 % on edited text and number variants", EVIDENCE,
         judges.worst("evidence/", "/token_error_p95", 0.20, judges.percent, most=True, within=judges.scenario(*EDITED))),
    Goal("Evidence", "edited text flagged as edited in >= 95 %", EVIDENCE, judges.edited_flag),
    Goal("Evidence", "no segment across a change", EVIDENCE, judges.wrong_segments),
    Goal("Evidence", "lookup p99 <= 1 ms, 8k tokens built like text, 8 donors a hit, 10,000 and 100,000 donors", SCALING,
         judges.at_scale(("hit_p99", "miss_p99"), 1e3, judges.us, most=True)),
    Goal("Evidence", "the same beside registrations without a pause, reported beside", SCALING,
         judges.shown_at_scale("beside_p99", judges.us)),
    Goal("Evidence", "lookup grows no faster than the logarithm of the donors", SCALING, judges.lookup_growth),
    Goal("Evidence", ">= 100 times faster than SemBlend at equal or better recall", EVIDENCE, judges.against_semblend),
    Goal("Evidence", "<= 4 KiB a donor", SCALING, judges.at_scale(("bytes_per_donor",), 4_096, lambda v: f"{v:,.0f} bytes", most=True)),
    Goal("Evidence", "add >= 5,000 donors/s", SCALING,
         judges.at_scale(("registers_per_second", "at_capacity_per_second"), 5_000, judges.rate, most=False)),
    Goal("Evidence", "no stall > 5 ms while adding, moving, removing, evicting at capacity (thread's own time)", SCALING,
         judges.at_scale(("longest_own",), 5e3, judges.us, most=True)),
    Goal("Evidence", "the same by the clock, beside lookups", SCALING, judges.at_scale(("stall_max",), 5e3, judges.us, most=True)),
    Goal("Evidence", "50,000 events/s on one core, into catalog and index", SCALING,
         judges.at_scale(("at_capacity_per_second", "moves_per_second", "evictions_per_second"), 50_000, judges.rate, most=False)),
    Goal("Evidence", "two tenants with the same text never see each other", EVIDENCE,
         judges.worst("evidence/", "/cross_tenant", 0, lambda v: f"{v:.0f} matches", most=True)),
    Goal("Placement", "added router time p50 <= 1 ms (8k tokens, 10,000 and 100,000 donors, 8 ranks)", "bench router",
         judges.router("p50", 1.0)),
    Goal("Placement", "added router time p99 <= 3 ms", "bench router", judges.router("p99", 3.0)),
    Goal("Placement", "requests/s over the bare Python pass-through >= 0.9", "bench router",
         judges.worst("router/throughput/", "/ours_over_bare", 0.9, judges.ratio, most=False)),
    Goal("Placement", "the same over Dynamo's own router, reported beside", "bench router",
         judges.shown("router/throughput/", "/ours_over_rust")),
    Goal("Placement", "working set twice the device pools: mean TTFT <= 0.7 of Dynamo kv alone, uniform arrivals", SCENARIOS,
         judges.compared("working_set_uniform", 0.7)),
    Goal("Placement", "the same, bursty arrivals", SCENARIOS,
         judges.compared("working_set_bursty", 0.7)),
    Goal("Placement", "the same, Mooncake's arrivals", SCENARIOS,
         judges.compared("working_set_mooncake", 0.7)),
    Goal("Placement", "the other scenarios in which something comes again: mean TTFT <= 1.02 of Dynamo kv alone", SCENARIOS,
         judges.beyond_the_working_set(1.02)),
    Goal("Placement", "negative controls: mean TTFT <= 1.02 of Dynamo kv alone", SCENARIOS,
         judges.compared("all_negative", 1.02)),
    Goal("Placement", "the same, three times as far apart", SCENARIOS,
         judges.compared("all_unhurried", 1.02)),
    Goal("Placement", "the same, prompts of 8k tokens", SCENARIOS,
         judges.compared("all_unhurried", 1.02, "long")),
    Goal("Placement", "the same, SmolLM2, prompts of 2k tokens", SCENARIOS,
         judges.compared("all_negative", 1.02, "language")),
    Goal("Placement", "the same through our router switched off, engines without a connector, reported beside", SCENARIOS, judges.hop),
    Goal("GPU's clock", "8k tokens, 8B model on an H200: negative controls, mean TTFT <= 1.02 of the best peer (Dynamo kv, kv + connector, round robin)", SCENARIOS,
         judges.over_the_best_peer(("negative", "negative_unhurried"), 1.02)),
    Goal("GPU's clock", "exact repeats and agent turns: <= 1.02 of the best peer", SCENARIOS,
         judges.over_the_best_peer(("system_prompt", "partial_overlap", "agent"), 1.02)),
    Goal("GPU's clock", "working set twice the device pools, uniform, bursty and Mooncake's arrivals: <= 0.85 of the best peer", SCENARIOS,
         judges.over_the_best_peer(("working_set_uniform", "working_set_bursty", "working_set_mooncake"), 0.85)),
    Goal("GPU's clock", "the same of a tenant with a salt: <= 0.6 of the best peer", SCENARIOS,
         judges.over_the_best_peer(("tenant_set_uniform",), 0.6)),
    Goal("Placement", "high-load batch: the lookup does not reduce throughput (tokens/s over the same without it >= 0.98)", SCENARIOS,
         judges.lookup_in_a_batch),
    Goal("Placement", "Mooncake replay: prefill tokens against round robin, Dynamo kv and the oracle", "bench replay", judges.shown_replay),
)  # fmt: skip
PROVEN_BY_TESTS = (
    "2,000 random schedules of engine and connector in `make test`, a longer run in `make schedules`",
    "faults at every step of a load plan, the peers' own tests, every dialect and layout (`tests/worker_connector`)",
    "two tenants with the same text: a property test that tries to break it (`tests/evidence/test_tenants.py`)",
    "the outcome ledger in any order (`tests/outcome/test_any_order.py`), and a soak of 30 minutes under random kills (`make soak`)",
)
"""Goals that have no figure."""
