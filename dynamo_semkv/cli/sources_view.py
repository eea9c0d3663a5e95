"""Renders what advice is made from, as `status` prints it: calibration, donor streams, the bus. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dynamo_semkv.cli import text as t
from dynamo_semkv.cli.tables import make_table, texts
from dynamo_semkv.cli.words import MATCHES, TIERS

CELLS = 12
STREAMS = 12
_MORE = "{} more with --json."


def sources(snapshot: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The three parts of a snapshot, for rich to print."""
    yield _calibration(snapshot["calibration"])
    yield _donor_streams(snapshot["catalog"])
    yield _bus(snapshot)


def _calibration(known: Mapping[str, Any]) -> RenderableType:
    headings = ("replica", "match", "overlap", "tier", ">expected", ">prior", ">trials", ">saves", ">loads")
    table = make_table("Calibration", *headings)
    cells = known.get("cells", ())
    for row in cells[:CELLS]:
        table.add_row(
            *texts(
                row["replica"],
                MATCHES.get(row["match_type"], row["match_type"]),
                row["overlap"],
                TIERS.get(row["tier"], row["tier"]),
            ),
            t.percent(row["share"]),
            t.percent(row["prior"]),
            t.decimal(row["trials"]),
            t.percent(row.get("saving")),
            t.decimal(row.get("loads")),
        )
    notes = [
        f"{t.clean(MATCHES.get(name, name))}: {t.percent(row['share'])} of a claim is expected to be confirmed, "
        f"over {t.decimal(row['trials'])} trials."
        for name, row in known.get("match_types", {}).items()
    ]
    notes += [
        f"From {t.clean(TIERS.get(name, name))}: a token spares {t.percent(row['saving'])} of its prefill, "
        f"over {t.decimal(row['loads'])} loads."
        for name, row in known.get("tiers", {}).items()
        if row["loads"] > 0
    ]
    rates = [
        f"{t.clean(row['replica'])} {t.count(round(row['tokens_per_second']))}" for row in known.get("prefill", ())
    ]
    if rates:
        notes.append(
            f"Measured prefill, tokens a second: {', '.join(rates[:CELLS])}{', ...' if len(rates) > CELLS else ''}."
        )
    if liars := [t.clean(name) for name in known.get("clocks_not_believed", ())]:
        notes.append(
            f"Load times not believed, since first tokens came later than they say: {', '.join(liars[:CELLS])}"
            f"{', ...' if len(liars) > CELLS else ''}."
        )
    if known.get("enabled") is False:
        notes.append("Learning is off (scoring.calibration.enabled): the priors are in force.")
    if len(cells) > CELLS:
        notes.append(_MORE.format(t.count(len(cells) - CELLS)))
    if not table.row_count:
        return Text("\n".join(["Calibration: nothing learned yet, every share is its prior.", *notes]))
    return Group(table, Text("\n".join(notes), "dim"))


def _donor_streams(catalog: Mapping[str, Any]) -> RenderableType:
    table = make_table("Donor streams", "replica", "state", ">donors", ">next event", "generation")
    streams = catalog.get("streams", ())
    for row in streams[:STREAMS]:
        state = "quarantined" if row["quarantined"] else "worker gone" if row["absent"] else "in order"
        name = row.get("replica") or f"{row['worker_id']}/{row['dp_rank']}"
        counts = (t.count(row.get("donors")), t.count(row.get("next_event_id")))
        table.add_row(*texts(name, state), *counts, *texts(row.get("generation")))
    states = catalog.get("stream_states", {})
    note = (
        f"Catalog: {t.count(catalog.get('donors'))} donors; streams: {t.count(states.get('ok'))} in order, "
        f"{t.count(states.get('quarantined'))} quarantined, {t.count(states.get('absent'))} of workers that are gone."
    )
    if len(streams) > STREAMS:
        note += " " + _MORE.format(t.count(len(streams) - STREAMS))
    return Group(table, Text(note, "dim")) if table.row_count else Text(note)


def _bus(s: Mapping[str, Any]) -> RenderableType:
    table = make_table("Bus", "stream", "read to the end", ">messages", ">refused")
    for row in s["streams"]:
        refused = sum(value for key, value in row.items() if key not in ("name", "caught_up", "messages"))
        table.add_row(
            *texts(row["name"], "yes" if row["caught_up"] else "no"), t.count(row["messages"]), t.count(refused)
        )
    states = []
    for side, key in (("publishing", "publisher"), ("reading", "subscriber")):
        stats = s[key]
        states.append(f"{side}: {'not known' if stats is None else 'connected' if stats['connected'] else 'away'}")
    publisher = s["publisher"] or {}
    states.append(f"{t.count(publisher.get('buffered'))} messages wait, {t.count(publisher.get('dropped'))} dropped")
    return Group(table, Text(f"{'; '.join(states)}.", "dim"))
