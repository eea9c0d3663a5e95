"""Numbers of a configuration that are each allowed and do not fit together. Pure: what is told, and nothing is
refused."""

from __future__ import annotations

from dynamo_semkv.config.schema import Config

DONOR_EVENT_BYTES = 2_600
"""Of a donor's registration with the sketch of a long prompt, as the bus stores it (docs/operations.md, sizes)."""


def misfits(config: Config) -> tuple[str, ...]:
    """One sentence for each pair of numbers of which one makes the other impossible."""
    bus, donors = config.bus, config.connector.max_donors
    needed = donors * DONOR_EVENT_BYTES
    found = []
    if needed > bus.stream_max_bytes:
        found.append(
            f"bus.stream_max_bytes is {bus.stream_max_bytes}: the {donors} donors of one replica "
            f"(connector.max_donors) take about {needed} bytes, so a router that starts later never learns of all of "
            "them"
        )
    if bus.max_buffered_bytes < DONOR_EVENT_BYTES:
        found.append(
            f"bus.max_buffered_bytes is {bus.max_buffered_bytes}: a donor's registration takes about "
            f"{DONOR_EVENT_BYTES}, so none of a long prompt is ever sent"
        )
    known = config.evidence.fingerprint.max_donors
    if known < donors:
        found.append(
            f"evidence.fingerprint.max_donors is {known}: one replica may have {donors} (connector.max_donors)"
        )
    age, beat = config.evidence.max_donor_age, config.connector.announce_interval_seconds
    if age < 3 * beat:
        found.append(
            f"evidence.max_donor_age is {age:g}: connectors say their donors again with an announcement, every "
            f"{beat:g} s at the most often (connector.announce_interval_seconds), so donors that are there end in "
            "between"
        )
    return tuple(found)
