"""Releases side by side: kept ones (releases/*.zip, by scripts/keep_release.py) in processes of their own, and this
checkout.

Read by values first, both ways; then workers and routers of both on one real broker, where both routers must come to
the same outcomes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_semkv.bus.publisher import BusPublisher
from dynamo_semkv.bus.server import EmbeddedNats
from dynamo_semkv.contracts import codec, subjects
from dynamo_semkv.contracts.identity import StableReplica
from tests.bus.waiting import settings, wait_for
from tests.contracts import peer

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(peer.__file__)
KEPT = sorted(Path(__file__).with_name("releases").glob("*.zip"))
each_release = pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
each_direction = pytest.mark.parametrize("direction", ["older writes, newer reads", "newer writes, older reads"])


def command(place: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-I", str(PEER), str(place), *arguments]


def run(place: Path, *arguments: str, said: str = "") -> Any:
    done = subprocess.run(
        command(place, *arguments), input=said, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def agree(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where two values differ in what both name."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            yield from agree(one[key], other[key], f"{at}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            yield from agree(left, right, f"{at}[]")
    elif one != other:
        yield f"{at}: {one!r} and {other!r}"


def test_there_is_a_kept_release_and_it_is_another_one() -> None:
    assert KEPT
    for path in KEPT:
        with zipfile.ZipFile(path) as kept:
            sources = [name for name in kept.namelist() if name.startswith("dynamo_semkv/contracts/")]
            assert any(kept.read(name).decode() != (ROOT / name).read_text() for name in sources)


@each_release
@each_direction
def test_every_message_is_read_to_the_same_values(kept: Path, direction: str) -> None:
    writer, reader = (kept, ROOT) if direction.startswith("older") else (ROOT, kept)
    written = run(writer, "write")
    assert set(written) == {*peer.PLAIN, "donor_json"}
    both_read = run(reader, "read", said=json.dumps(written)), run(writer, "read", said=json.dumps(written))
    for name in written:
        assert "refused" not in both_read[0][name], (name, both_read[0][name])
        assert list(agree(both_read[0][name], both_read[1][name])) == [], name


def newer(name: str, version: str) -> dict[str, Any]:
    """A message of a release to come: another version, and fields that nobody here knows, at every level but the
    namespace."""
    raw = {kind: encode(peer.made(kind)) for kind, (_, encode, _) in peer.codecs().items() if kind in peer.PLAIN}[name]
    plain: dict[str, Any] = msgspec.msgpack.decode(raw)
    return {**plain, "version": version, "added": {"deep": [1, None]}}


@each_release
@pytest.mark.parametrize("name", ["report", "announcement", "opened", "observed", "delivery"])
def test_both_take_a_newer_minor_and_both_refuse_another_major_by_name(kept: Path, name: str) -> None:
    asked = {
        f"{name}:minor": msgspec.msgpack.encode(newer(name, "1.7")).hex(),
        f"{name}:major": msgspec.msgpack.encode(newer(name, "2.0")).hex(),
        f"{name}:all_new": msgspec.msgpack.encode({"version": "3.1", "nothing": "as before"}).hex(),
    }
    for place in (kept, ROOT):
        answers = run(place, "read", said=json.dumps(asked))
        assert "refused" not in answers[f"{name}:minor"]
        for other in ("major", "all_new"):
            assert answers[f"{name}:{other}"]["refused"] is True
            assert "allowed: 1.x" in answers[f"{name}:{other}"]["error"]


@contextmanager
def router(place: Path, url: str, numbers: str, served_by: str, *more: str) -> Iterator[Any]:
    """A function that asks a router of that release what it knows."""
    process = subprocess.Popen(
        command(place, "router", url, numbers, served_by, *more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:

        def ask() -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        ask()  # started: how long that takes is not what anybody waits for
        yield ask
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        process.stdin.close()
        process.stdout.close()


def strangers(url: str) -> None:
    """One message of a major to come on each stream, each on its sender's own subject."""
    replica = StableReplica("worker-0", 1)
    publisher = BusPublisher(settings(url), "stranger")
    publisher.start()
    for subject, name in (
        (subjects.reports(replica), "report"),
        (subjects.announcements(StableReplica("worker-9", 1)), "announcement"),
        (subjects.routes("router-0"), "opened"),
    ):
        payload = msgspec.msgpack.encode(newer(name, "2.0"))
        assert publisher.publish(subject, payload, content_type=codec.MSGPACK, message_id=f"stranger-{name}")
    donor = msgspec.json.encode({"schema_version": 2, "event_id": 0})
    assert publisher.publish(subjects.donor_events(replica), donor, message_id="stranger-donor")
    wait_for("stored", lambda: publisher.stats().published == 4)
    publisher.close(5.0)


@pytest.mark.graph
@each_release
def test_workers_and_routers_of_both_on_one_broker_come_to_the_same_outcomes(kept: Path, tmp_path: Path) -> None:
    """Routes 1 to 3: opened by an older router, served by a newer worker. 11 to 13: the other way round. Beside them,
    messages of a major that neither knows: counted, and nothing else. The newer ones write no packs, as
    docs/releasing.md says for such a time."""
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    try:
        run(ROOT, "worker", server.url, "1-3")
        run(kept, "worker", server.url, "11-13")
        strangers(server.url)
        with (
            router(kept, server.url, "1-3", "worker-1") as older,
            router(ROOT, server.url, "11-13", "worker-11") as newer_one,
        ):
            closed = {str(number): ["materialized_exact", 896] for number in (1, 2, 3, 11, 12, 13)}
            refused = {
                f"{stream}.unsupported_version": 1 for stream in ("reports", "announcements", "routes", "donors")
            }
            for ask in (older, newer_one):
                wait_for("all routes", lambda ask=ask: ask()["closed"] == closed)
                wait_for("all donors", lambda ask=ask: ask()["donors"] == ["worker-1", "worker-11"])
                wait_for("all announcements", lambda ask=ask: ask()["announced"] == ["worker-1", "worker-11"])
                wait_for("the strangers", lambda ask=ask: ask()["refused"] == refused)
    finally:
        server.kill()


@pytest.mark.graph
@each_release
def test_packs_beside_a_router_that_knows_none_cost_it_what_is_in_them_and_nothing_else(
    kept: Path, tmp_path: Path
) -> None:
    """Whoever leaves `bus.pack_records` on while older routers still read. Routes 1 to 40 are the newer ones', 51 to 53
    the older ones'."""
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    try:
        run(ROOT, "worker", server.url, "1-40", "packs")
        run(kept, "worker", server.url, "51-53")
        with (
            router(ROOT, server.url, "1-40", "worker-1", "packs") as newer_one,
            router(kept, server.url, "51-53", "worker-51") as older,
        ):
            confirmed = ["materialized_exact", 896]
            wait_for(
                "all routes", lambda: newer_one()["closed"] == {str(n): confirmed for n in (*range(1, 41), 51, 52, 53)}
            )
            assert newer_one()["refused"].get("routes.unsupported_version") is None
            own = {str(number): confirmed for number in (51, 52, 53)}
            wait_for("its own", lambda: own.items() <= older()["closed"].items())
            wait_for("named", lambda: older()["refused"].get("reports.unsupported_version"))
            assert older()["live"]
            assert not [kind for kind in older()["refused"] if kind.endswith(("malformed", "foreign_subject"))]
    finally:
        server.kill()
