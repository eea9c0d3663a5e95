"""Measures one group: all contenders are up, scenarios run one after the other, contenders in turn within each
scenario, in as many repeats as are asked for.

What is recorded of a request is plain data (`Record`). What the router knows of it is read at the end, when every route
has closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from dynamo_semkv.bench.client import Answer, ChatClient
from dynamo_semkv.bench.corpus import installed
from dynamo_semkv.bench.report import quality
from dynamo_semkv.bench.report.library import Library
from dynamo_semkv.bench.report.machine import commit
from dynamo_semkv.bench.report.workload import Pass, Timed, shuffled
from dynamo_semkv.bench.scenarios import ChatRequest
from dynamo_semkv.bus.child_process import wait_until
from graphs.bench.contenders import COLD, KV, OURS, niceness, settings
from graphs.bench.groups import Group, Planned
from graphs.local.graph import LocalGraph
from graphs.local.settings import MODELS, GraphSettings
from worker_connector.reference_engine.models.model_directory import write_model_directory
from worker_connector.reference_engine.models.presets import ModelSource, load_model
from worker_connector.reference_engine.timing.profile import load_profile

GAP = 1.0
"""Arrivals are on average so many cold prefills apart. So two engines are busy for half of the time at most, and bursts
queue."""
SHORTEST_GAP = 0.05
WARM_UPS = 2
"""Prompts of every graph before anything counts; the last one's time is taken for the gap."""
ROUTES_SECONDS = 45.0
"""Longer than a route waits for its report."""
SETTLE_SECONDS = 10.0
PATIENCE_SECONDS = 600.0
"""The most that one answer may take: 32k tokens take half a minute on two quiet cores, and minutes on busy ones."""
REST_SECONDS = 30.0
REST_WINDOW = 0.2
REST_SHARE = 0.25
"""Share of one core below which a graph is at rest: five idle processes take less than a twentieth."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """One request of one contender. Times are in seconds as the client saw them; `likeness` compares with the cold
    answer."""

    scenario: str
    contender: str
    repeat: int
    turn: int
    """Which pass of the scenario."""
    phase: str
    number: int
    ok: bool
    ttft: float | None
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine counts as not computed: they were on the device or loaded."""
    pass_seconds: float
    """Seconds from the first request of its pass to the last answer."""
    likeness: dict[str, float] | None = None
    route: dict[str, Any] | None = None
    """What our router knows of it."""
    error: str | None = None


@dataclass
class _Sent:
    record: Record
    request: ChatRequest
    answer: Answer


def measure(
    group: Group, *, repeats: int, seed: int, intervals: Sequence[float], folder: Path, say: Say
) -> dict[str, Any]:
    """Returns {"title", "gap", "scenarios": {name: {...}}, "records": [...], "trouble": [...], ...}. GraphError if a
    graph does not come up."""
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    model_dir = write_model_directory(source(group), folder / "models")
    warm_up = len(group.contenders) * WARM_UPS * _warm_up_characters(group)
    library = Library(group.characters * repeats + warm_up, installed())
    with ExitStack() as stack:
        graphs: dict[str, LocalGraph] = {}
        for name in group.contenders:
            (run_dir := folder / f"{group.name}-{name}").mkdir(parents=True, exist_ok=True)
            made = settings(name, group, model_dir, run_dir / "disk")
            say(f"{group.name}: starting {name}")
            graphs[name] = stack.enter_context(LocalGraph(made, run_dir=run_dir, model_dir=folder / "models"))
        gap = _calibrate(graphs, library, group)
        say(f"{group.name}: a cold prompt every {gap:.2f} s")
        sent: list[_Sent] = []
        scenarios: dict[str, dict[str, Any]] = {}
        for repeat in range(repeats):
            for number, planned in enumerate(
                group.planned(library, replace(group.sizes, gap=gap), seed + repeat, intervals)
            ):
                scenario = planned.scenario
                scenarios[scenario.name] = _described(planned)
                began = time.monotonic()
                able = [name for name in planned.contenders if name in graphs]
                for name in shuffled(able, (seed + repeat) * 1_000 + number):
                    sent += _run(graphs[name], name, scenario, repeat)
                    rest(lambda graph=graphs[name]: processor_seconds(graph))  # type: ignore[misc]
                say(f"{group.name} {repeat + 1}/{repeats} {scenario.name}: {time.monotonic() - began:.0f} s")
        routes = _routes(graphs, sent)
        trouble = [f"{name}: {line}" for name, graph in graphs.items() for line in graph.trouble()]
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return {
        "title": group.title,
        "measured": {"at": at, "commit": commit(), "niceness": niceness(group)},
        "model": _served(group),
        "workers": group.workers,
        "device_tokens": group.blocks_per_rank * 32 * group.workers,
        "gap": gap,
        "engine": _engine(group),
        "scenarios": scenarios,
        "records": [asdict(record) for record in _finished(sent, routes, tokenizer)],
        "trouble": trouble,
    }


def _served(group: Group) -> str:
    return MODELS[group.model]


def source(group: Group) -> ModelSource:
    """The model of a group's engines."""
    return GraphSettings(model=group.model, profile=group.profile).model_source()


def _engine(group: Group) -> dict[str, float]:
    """What the physical limits of a prefill follow from. Rates are those of a GPU; without one the machine's own count.
    The attention figure is per square token: a prompt of n tokens takes n**2 times as many on top."""
    if group.profile is not None:
        profile = load_profile(group.profile)
        return {
            "flops_per_token": 2.0 * profile.parameters,
            "attention_flops_per_square_token": 2.0 * profile.layers * profile.heads * profile.head_dim,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
            "flops_per_second": profile.flops_per_second,
            "copy_bytes_per_second": profile.bus_bytes_per_second,
        }
    config = load_model(ModelSource(_served(group))).config
    width, kv = config.num_heads * config.head_dim, config.kv_elements_per_token
    weights = config.hidden_size * (2 * width + 2 * kv + 3 * config.intermediate_size) * config.num_layers
    return {
        "flops_per_token": 2.0 * weights,
        "attention_flops_per_square_token": 2.0 * config.num_layers * width,
        "kv_bytes_per_token": 2.0 * 4 * kv * config.num_layers,
    }


def _described(planned: Planned) -> dict[str, Any]:
    scenario = planned.scenario
    paced = any(offset for one in scenario.passes for offset in one.offsets)
    return {"title": scenario.title, "kind": scenario.kind, "requests": scenario.requests, "paced": paced}


def _calibrate(graphs: dict[str, LocalGraph], library: Library, group: Group) -> float:
    """Warms every graph up with prompts of its own; returns the gap in seconds, from what the last prompt of each
    took."""
    seconds = [0.0]
    for graph in graphs.values():
        client = ChatClient(graph.frontend_url, graph.settings.served_model, PATIENCE_SECONDS)
        for _ in range(WARM_UPS):
            text = library.take(_warm_up_characters(group)).text
            answer = asyncio.run(client.send(ChatRequest(({"role": "user", "content": text},), "warm-up", 4)))
            if answer.ttft_seconds is None:
                raise RuntimeError(f"{group.name}: the warm-up failed: {answer.error}")
            seconds.append(answer.ttft_seconds)
    return max(SHORTEST_GAP, GAP * median(seconds[WARM_UPS::WARM_UPS]))


def _warm_up_characters(group: Group) -> int:
    """A GPU's prompts warm up at their own length: they take no processor, and the gap follows from them."""
    return min(group.sizes.characters, 4_000) if group.profile is None else group.sizes.characters


def _run(graph: LocalGraph, contender: str, scenario: Timed, repeat: int) -> list[_Sent]:
    found: list[_Sent] = []
    client = ChatClient(graph.frontend_url, graph.settings.served_model, PATIENCE_SECONDS)
    passes = _distinct(scenario, repeat) if contender == COLD else scenario.passes
    for turn, one in enumerate(passes):
        if one.empties_device:
            empty_devices(graph)
        took, answers = asyncio.run(_send(client, one))
        for number, (request, answer) in enumerate(zip(one.requests, answers, strict=True)):
            record = Record(
                scenario=scenario.name,
                contender=contender,
                repeat=repeat,
                turn=turn,
                phase=one.phase(number),
                number=number,
                ok=answer.ok,
                ttft=answer.ttft_seconds,
                seconds=answer.seconds,
                prompt_tokens=answer.prompt_tokens or 0,
                cached_tokens=answer.cached_tokens or 0,
                pass_seconds=took,
                error=answer.error,
            )
            found.append(_Sent(record, request, answer))
    return found


def _distinct(scenario: Timed, repeat: int) -> list[Pass]:
    """Each different prompt once, under a salt of its own: shows what it costs and answers when nothing can be
    reused."""
    seen: dict[str, tuple[ChatRequest, float]] = {}
    for one in scenario.passes:
        for request, offset in zip(one.requests, one.offsets, strict=True):
            seen.setdefault(_key(request), (request, offset))
    number = [f"cold-{scenario.name}-{repeat}-{n}" for n in range(len(seen))]
    requests = [replace(r, cache_salt=salt) for (r, _), salt in zip(seen.values(), number, strict=True)]
    offsets = sorted(offset for _, offset in seen.values())
    return [Pass(tuple(requests), tuple(offsets), phases=("first",) * len(requests))]


def _key(request: ChatRequest) -> str:
    """Key of the prompt; the tenant is not in it, as it does not change an answer."""
    return json.dumps(request.messages)


async def _send(client: ChatClient, one: Pass) -> tuple[float, list[Answer]]:
    began = time.perf_counter()

    async def at(offset: float, request: ChatRequest) -> Answer:
        await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
        return await client.send(request)

    answers = await asyncio.gather(*(at(o, r) for o, r in zip(one.offsets, one.requests, strict=True)))
    return time.perf_counter() - began, list(answers)


def rest(used: Callable[[], float]) -> None:
    """Waits, for REST_SECONDS at most, until a graph is at rest: what one contender still does in the background
    (SemBlend embeds donors for seconds, a connector computes checksums) must not load the machine for the next one.
    `used`: the graph's processor seconds so far."""
    deadline, before = time.monotonic() + REST_SECONDS, used()
    while time.monotonic() < deadline:
        time.sleep(REST_WINDOW)
        now = used()
        if now - before < REST_SHARE * REST_WINDOW:
            return
        before = now


def processor_seconds(graph: LocalGraph) -> float:
    """Processor time of all processes of a graph so far; a process that has ended counts for nothing."""
    ticks = 0
    for pid in (graph.nats.pid, *(process.pid for process in graph.processes.values())):
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def empty_devices(graph: LocalGraph) -> None:
    """Makes engines forget every device block that no request holds; host memory keeps what it has. Waits, within
    bounds, until open saves have ended before, until all blocks are gone after, and half a second for the events that
    tell Dynamo."""
    wait_until(
        lambda: all(not (rank["connector"] or {}).get("open_saves") for rank in _ranks(graph)), SETTLE_SECONDS, 0.05
    )
    for worker in graph.worker_names:
        url = f"{graph.status_url(worker)}/engine/reset_prefix_cache"
        request = urllib.request.Request(url, data=b"{}", headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10):
            pass
    wait_until(lambda: not any(rank["engine"]["cached_blocks"] for rank in _ranks(graph)), SETTLE_SECONDS, 0.05)
    time.sleep(0.5)


def _ranks(graph: LocalGraph) -> list[dict[str, Any]]:
    return [rank for worker in graph.worker_names for rank in _get(f"{graph.status_url(worker)}/engine/semkv")["ranks"]]


def _get(url: str) -> dict[str, Any]:
    """The JSON at `url`; `{"routes": [], "ranks": []}` where nothing answers (yet)."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            parsed: dict[str, Any] = json.load(response)
            return parsed
    except (urllib.error.URLError, OSError, ValueError):
        return {"routes": [], "ranks": []}


def _routes(graphs: dict[str, LocalGraph], sent: Sequence[_Sent]) -> dict[str, dict[str, Any]]:
    """Facts by request id, without requests that the router still does not know when the time is up."""
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + ROUTES_SECONDS
    for one in sent:
        name, request_id = one.record.contender, one.answer.request_id
        if name not in OURS or not one.answer.ok or request_id is None:
            continue
        while True:
            routes = _get(f"{graphs[name].page_url()}/api/requests/{request_id}").get("routes", [])
            if routes or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if routes:
            found[request_id] = route_facts(routes[-1])
    return found


def route_facts(route: dict[str, Any]) -> dict[str, Any]:
    """What the report needs of one item of the page's `/api/requests/{id}`, in tokens and seconds."""
    opened, report = route["opened"], route["report"] or {}
    return {
        "decision": route["decision"],
        "outcome": route["outcome"],
        "reason": route["reason"],
        "ttft_class": route["ttft_class"],
        "router_ttft": route["ttft_seconds"],
        "lookup": opened["lookup"],
        "lookup_seconds": opened["lookup_seconds"],
        "evidence": route["tokens"]["evidence"],
        "placed": route["tokens"]["placed"],
        "hinted": route["tokens"]["hinted"],
        "confirmed": report.get("confirmed", 0),
        "local": report.get("local_tokens", 0),
        "tier": report.get("tier"),
        "load_seconds": report.get("load_seconds"),
        "cross_check": route["cross_check"],
    }


def _finished(sent: Sequence[_Sent], routes: dict[str, dict[str, Any]], tokenizer: Tokenizer) -> list[Record]:
    """Records with the route of each, and its answer compared with the cold one: that of the contender `cold`, else of
    `kv` where it computed everything."""
    cold: dict[str, list[int]] = {}
    for contender in (COLD, KV):
        for one in sent:
            if one.record.contender == contender and one.answer.ok and not one.record.cached_tokens:
                cold.setdefault(_key(one.request), tokenizer.encode(one.answer.text).ids)
    found = []
    for one in sent:
        reference = cold.get(_key(one.request))
        like = None
        if one.answer.ok and reference is not None and one.record.contender != COLD:
            like = asdict(quality.likeness(reference, tokenizer.encode(one.answer.text).ids))
        found.append(replace(one.record, likeness=like, route=routes.get(one.answer.request_id or "")))
    return found
