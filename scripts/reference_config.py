# ruff: noqa: E501 - paragraphs and tables of Markdown
"""Makes docs/reference/config.md: every field of the configuration, from the declarations that check a file and the
comments that ship with it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
from field_docs import cell, class_doc

from dynamo_semkv.config.limits import Limits, limits_of
from dynamo_semkv.config.schema import Config
from dynamo_semkv.config.watch import reloadable

ROOT = Path(__file__).resolve().parents[1]
INTRO = """\
# Configuration

Made by `python scripts/reference.py`; a test keeps it current. The same as a file to copy from: [reference.yaml](../../configs/reference.yaml);
for editors: [semkv.schema.json](../../configs/semkv.schema.json).

One YAML file serves routers and connectors; every section and field may be left out. A field is set by the first of these that names it:

1. the variable `SEMKV_<SECTION>__<FIELD>`, two underscores between the levels (`SEMKV_EVIDENCE__FINGERPRINT__MAX_DONORS=50000`), its value
   read as YAML (what Kubernetes makes of Services, such as `SEMKV_BUS_SERVICE_HOST`, is ignored);
2. the file (`--config`, else `SEMKV_CONFIG`);
3. for `dynamo.namespace` and `bus.url` alone: `DYN_NAMESPACE` and `NATS_SERVER`;
4. the default.

*Live*: a running router takes the change over; everything else waits for a restart, and connectors read their file once. An unknown key, a
value out of range or a file that is not there is refused with its path, the value and what is allowed (`python -m dynamo_semkv check-config FILE`).
A value is used as it is written. What YAML 1.1 and 1.2 read in different ways (`010`, `0o17`, `1:30`, `yes`, dates) is a text, and refused where a number
or a boolean is meant; a text has no line end, tab or blank at its ends, and a number as text wants quotes.
"""


MEANINGS = {
    "dynamo.namespace": "Dynamo namespace of workers and routers.",
    "dynamo.worker_component": "Component under which the workers serve; `prefill` where prefill and decode are apart.",
    "dynamo.worker_endpoint": "Their endpoint.",
    "dynamo.router_component": "Component under which this router serves; several routers under one name share the "
    "requests.",
    "dynamo.router_endpoint": "Its endpoint.",
    "dynamo.kv_router.router_temperature": "0: the best worker always; above: drawn, the flatter the higher.",
    "dynamo.kv_router.overlap_score_credit": "Weight of cached blocks against load in Dynamo's own choice.",
    "dynamo.kv_router.host_cache_hit_weight": "Share that a block in the host tier counts of one on the device.",
    "dynamo.kv_router.disk_cache_hit_weight": "The same for the disk tier.",
    "dynamo.kv_router.router_queue_threshold": "Load from which Dynamo's router queues requests. null: never.",
    "dynamo.kv_router.router_predicted_ttl_seconds": "How long Dynamo takes the blocks of a prompt that it has just "
    "placed for cached there, before the engine says so: prompts that begin alike and come in a burst then meet on one "
    "worker. null: only what engines have said.",
    "dynamo.kv_router.session_affinity_ttl_seconds": "How long Dynamo keeps a session on its worker. null: no affinity.",
    "bus.max_buffered_bytes": "The same in bytes.",
    "evidence.max_matches": "Matches of a lookup that are weighed, the strongest first.",
    "evidence.fingerprint.enabled": "The built-in provider: an index over sampled token n-grams of registered donors.",
    "evidence.fingerprint.max_donors": "Donors that are indexed; beyond, the largest namespaces give up their oldest.",
    "evidence.fingerprint.max_donors_per_namespace": "The same within one namespace, that is one tenant of one model.",
    "evidence.embedding.enabled": "Donors that say the same in other words ([evidence](../evidence.md)). Needs the "
    "extra `embeddings`.",
    "evidence.embedding.window_tokens": "Length of a window of text that is embedded, in tokens of the encoder.",
    "evidence.embedding.max_donors": "Donors that are kept.",
    "evidence.semblend.enabled": "SemBlend 0.3.25 ([evidence](../evidence.md)). Needs the extra `semblend`, torch "
    "and a model directory.",
    "evidence.semblend.max_prompt_bytes": "As `evidence.embedding.max_prompt_bytes`.",
    "evidence.semblend.min_similarity": "SemBlend's own threshold on the likeness of two prompts.",
    "evidence.semblend.min_reuse_ratio": "SemBlend's own threshold on the share that is reusable.",
    "scoring.prior.exact_equivalent": "For claims of a proven prefix.",
    "scoring.prior.semantic_candidate": "For claims of likeness.",
    "scoring.tier_credit.device": "On the device.",
    "scoring.tier_credit.host_pinned": "In host memory.",
    "scoring.tier_credit.disk": "On disk.",
    "scoring.tier_credit.external": "In a store that workers share.",
    "outcome.history_size": "Closed routes that the page can show.",
    "outcome.max_open_routes": "Routes that wait for their outcome; beyond, the oldest close as `unconfirmed`.",
    "dashboard.enabled": "Serve the page, and `/metrics` and `/readyz` with it.",
    "dashboard.host": "Where the page listens. Not a loopback address: `dashboard.token_file` is required.",
    "connector.materialization": "off: save and load nothing. exact: load identical blocks. experimental: refused "
    "today.",
    "connector.max_leases": "Offers that are held for requests which have not been loaded yet.",
    "connector.hint_ttl_seconds": "How long a hint waits for its request.",
    "connector.max_hints": "Hints that are kept.",
    "connector.announce_interval_seconds": "How often a connector says that it is there; silent for three of them, "
    "it counts as gone.",
    "connector.report_buffer": "Reports that are kept until the broker takes them.",
    "connector.max_donors": "Donors that a rank registers; beyond, the oldest are evicted.",
    "connector.metrics_host": "Where that server listens.",
    "placement.mode": "off: pass through. shadow: decide and record only. canary: act on a share of the requests. "
    "enforce: act.",
}
"""Meanings of fields that the schema does not document."""


@cache
def comments() -> dict[str, str]:
    """Dotted path -> the comment right above it in reference.yaml."""
    found: dict[str, str] = {}
    levels: list[str] = []
    above: list[str] = []
    for line in (ROOT / "configs" / "reference.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.removeprefix("#").strip())
            continue
        if text:
            levels[(len(line) - len(line.lstrip())) // 2 :] = [text.partition(":")[0]]
            found[".".join(levels)] = " ".join(above)
        above = []
    return found


def shown(value: object) -> str:
    """A default as JSON, a text without its quotes."""
    return msgspec.json.encode(value).decode().strip('"')


def fields(section: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, Limits, object, str]]:
    """(path, limits, default, meaning) of every field below a section, in the order of the schema."""
    documented = class_doc(section).fields
    defaults = section()
    commented = comments()
    for name, limits in limits_of(section).items():
        here = f"{path}.{name}" if path else name
        if issubclass(limits.kind, msgspec.Struct):
            yield from fields(limits.kind, here)
        else:
            yield (
                here,
                limits,
                getattr(defaults, name),
                documented[name].text or MEANINGS.get(here) or commented.get(here, ""),
            )


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRO]
    section = ""
    for path, limits, default, meaning in fields(Config):
        if path.rpartition(".")[0] != section:
            section = path.rpartition(".")[0]
            parts.append(f"\n## `{section}`\n\n| field | default | allowed | live | meaning |\n|---|---|---|---|---|")
        live = "yes" if reloadable(path) else ""
        name = path.rpartition(".")[2]
        words = cell(meaning).replace(" None: ", " null: ").replace(" False: ", " false: ")  # as YAML writes them
        parts.append(f"| `{name}` | `{shown(default)}` | {cell(limits.allowed())} | {live} | {words} |")
    return "\n".join(parts) + "\n"
