"""Defines which scenarios run on which kind of engine. The contenders of a group are up at the same time and take
turns, scenario by scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dynamo_semkv.bench.paraphrase import pairs, translations, verses
from dynamo_semkv.bench.report import workload
from dynamo_semkv.bench.report.library import Library
from dynamo_semkv.bench.report.workload import Sizes, Timed

MIB = 2**20
ALL = ("semkv", "no_lookup", "kv", "kv_connector", "passing", "round_robin", "semblend", "cold")
BUT_PASSING = tuple(name for name in ALL if name not in ("passing", "no_lookup"))
"""For scenarios with something to reuse: there a router that only passes on, or looks nothing up, shows nothing new."""
BUT_ABLATION = tuple(name for name in BUT_PASSING if name != "kv_connector")
"""For scenarios where nothing is in host memory only: there a connector under Dynamo's own router shows nothing new."""


@dataclass(frozen=True)
class Planned:
    """One scenario, and the contenders that run it."""

    scenario: Timed
    contenders: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """One kind of engine with its scenarios; block and slab sizes are those of each worker."""

    name: str
    title: str
    model: str
    blocks_per_rank: int
    sizes: Sizes
    contenders: tuple[str, ...]
    plan: Callable[[Library, Sizes, int, Sequence[float]], list[Planned]]
    """(text, sizes with the measured gap, seed, intervals of the trace) -> the scenarios of one repeat."""
    characters: int
    """Characters of text that one repeat uses, at most."""
    profile: str | None = None
    """Of the model `timed`: the GPU whose time the engines take."""
    gives_way: bool = True
    """The engines give way to the other processes, as those that compute on a GPU do."""
    workers: int = 2
    threads: int = 1
    max_num_tokens: int = 512
    slab_bytes: int = 128 * MIB
    disk_bytes: int = 0
    default_repeats: int | None = None
    """The most repeats if the group was not asked for by name, for groups that take minutes each time. None: as many as
    the others."""
    only: tuple[str, ...] = ()
    """Names of the scenarios to run; empty: all. Prompts are the same either way."""

    def planned(self, library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
        """The scenarios of one repeat; arguments as for `plan`."""
        every = self.plan(library, sizes, seed, intervals)
        return [one for one in every if not self.only or one.scenario.name in self.only]


def _everything(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
    """The RFC's scenarios except the lengths and the disk."""
    both = ("semkv", "kv")
    routed = ("semkv", "kv", "round_robin")
    single = [
        workload.exact_repeat(library, sizes),
        workload.partial_overlap(library, sizes),
        workload.other_instruction(library, sizes),
        workload.reordered(library, sizes, seed),
        workload.agent(library, sizes),
    ]
    if (paraphrased := _paraphrased(sizes, seed)) is not None:
        single.append(paraphrased)
    single += [workload.tenants(library, sizes), workload.negatives(library, sizes)]
    # All contenders run the negative controls: these show what saving costs, and what a second hop costs.
    found = [Planned(scenario, ALL if scenario.name == "negative" else BUT_ABLATION) for scenario in single]
    found.append(Planned(workload.working_set(library, sizes, "uniform"), BUT_PASSING))
    title = "host offload of a tenant (salted), which Dynamo's index does not see"
    salted = workload.working_set(library, sizes, "uniform", name="tenant_set", title=title, salt="tenant-w")
    found.append(Planned(salted, (*both, "kv_connector")))
    found += [
        Planned(workload.working_set(library, sizes, pattern, intervals), both) for pattern in ("bursty", "mooncake")
    ]
    found.append(Planned(workload.unhurried(library, sizes), (*both, "kv_connector", "passing")))
    found.append(Planned(workload.high_load(library, sizes), (*routed, "no_lookup", "kv_connector", "passing")))
    return found


def _paraphrased(sizes: Sizes, seed: int) -> Timed | None:
    """None where the package with the two translations is not installed."""
    try:
        later, earlier = (verses(path) for path in translations())
    except ImportError:
        return None
    found = []
    for number, pair in enumerate(pairs(sizes.characters // 3, later, earlier)):
        if number >= 2 * seed:
            found.append((pair.donor, pair.prompt))
        if len(found) == 2:
            return workload.paraphrased_qa(found, sizes)
    return None


def _lengths(lengths: Sequence[int], name: str) -> Callable[[Library, Sizes, int, Sequence[float]], list[Planned]]:
    def plan(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
        return [Planned(one, ALL) for one in workload.by_length(library, lengths, name)]

    return plan


def _long(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
    """Prompts of 8k and 16k tokens. One of 8k takes more than twice what the warm-up's 4k took, so the next comes when
    the engines are about to be idle."""
    eight = replace(sizes, characters=8_192)
    negative = replace(workload.unhurried(library, eight), name="long_negative", title="negative controls of 8k tokens")
    return [*_lengths([8_192, 16_384], "long")(library, sizes, seed, intervals), Planned(negative, ("semkv", "kv"))]


def _disk(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
    title = "disk: working set larger than device pools and host slabs"
    patterns = ("uniform", "bursty")  # in a burst, those that wait give the disk its time
    return [Planned(workload.working_set(library, sizes, one, name="disk", title=title), ALL) for one in patterns]


def _small(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
    """Scenarios in real language, for a model whose answers mean something."""
    found = [Planned(one, ALL) for one in workload.by_length(library, [sizes.characters], "language", "characters")]
    return [*found, Planned(replace(workload.negatives(library, sizes), name="language_negative"), ALL)]


def _every_peer(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
    """The same scenarios, each with every peer: engines that take a GPU's time cost next to nothing here."""
    peers = ("semkv", "kv", "kv_connector", "round_robin")
    planned = _everything(library, sizes, seed, intervals)
    return [replace(one, contenders=tuple(dict.fromkeys((*peers, *one.contenders)))) for one in planned]


_RFC = Group(
    name="rfc",
    title="the RFC's scenarios, `tiny`, prompts of 1.5k tokens",
    model="tiny",
    blocks_per_rank=96,
    sizes=Sizes(characters=1_500, gap=0.0, documents=8, passes=3, negatives=10),
    contenders=ALL,
    plan=_everything,
    characters=1_500 * 64 + 24 * 500,
)
"""Its device pools are 2 x 96 blocks of 32 tokens; its working set is twice that."""
_GPU = Group(
    name="gpu",
    title="the RFC's scenarios on the clock of an 8B model on an H200, prompts of 8k tokens",
    model="timed",
    profile="llama-8b-h200",
    blocks_per_rank=500,
    sizes=Sizes(characters=8_000, gap=0.0, documents=8, passes=3, negatives=10),
    contenders=tuple(name for name in ALL if name not in ("semblend", "cold")),
    plan=_every_peer,
    characters=8_000 * 68 + 24 * 500,
    max_num_tokens=8_192,
    slab_bytes=64 * MIB,
)
_LONG = Group(
    name="long",
    title="8k and 16k tokens, `tiny`",
    model="tiny",
    blocks_per_rank=1_100,
    sizes=Sizes(characters=16_384, gap=0.0, negatives=4),
    contenders=("semkv", "kv"),
    plan=_long,
    characters=(24 + 4 * 8) * 1024,
    threads=2,
    max_num_tokens=2_048,
    slab_bytes=256 * MIB,
)
_LONGEST = replace(
    _LONG,
    name="longest",
    title="32k tokens, `tiny`",
    plan=_lengths([32_768], "long"),
    characters=32 * 1024,
    default_repeats=1,
)
_DISK = Group(
    name="disk",
    title="disk tier, `tiny`, prompts of 1k tokens",
    model="tiny",
    blocks_per_rank=48,
    sizes=Sizes(characters=1_000, gap=0.0, documents=14, passes=2),
    contenders=("semkv", "kv", "kv_connector"),
    plan=_disk,
    characters=1_000 * 28,
    slab_bytes=9 * MIB,
    disk_bytes=512 * MIB,
)
_LANGUAGE = Group(
    name="language",
    title="2k tokens, SmolLM2-135M",
    model="smollm2",
    blocks_per_rank=160,
    sizes=Sizes(characters=8_000, gap=0.0, negatives=1),
    contenders=("semkv", "kv", "cold"),
    plan=_small,
    characters=8_000 * 2,
    threads=2,
    slab_bytes=512 * MIB,
)


def groups() -> dict[str, Group]:
    """The groups of the full report by name."""
    return {group.name: group for group in (_RFC, _GPU, _LONG, _LONGEST, _DISK, _LANGUAGE)}


def quick() -> dict[str, Group]:
    """One small group with every kind of contender but the slow ones, to check that the harness works."""
    sizes = Sizes(characters=480, gap=0.0, repeats=2, documents=4, passes=2, negatives=2, batch=4)

    def plan(library: Library, sizes: Sizes, seed: int, intervals: Sequence[float]) -> list[Planned]:
        few = ("semkv", "kv", "cold")
        return [
            Planned(workload.exact_repeat(library, sizes), few),
            Planned(workload.negatives(library, sizes), few),
            Planned(workload.working_set(library, sizes, "mooncake", intervals), few),
            *(Planned(one, few) for one in workload.by_length(library, [512], "long")),
        ]

    return {
        "quick": replace(
            _RFC,
            name="quick",
            title="a short check of the harness; no figure of it means anything",
            blocks_per_rank=24,
            sizes=sizes,
            contenders=("semkv", "kv", "cold"),
            gives_way=False,  # beside other work engines that give way would hardly run
            plan=plan,
            characters=20 * 500,
        )
    }
