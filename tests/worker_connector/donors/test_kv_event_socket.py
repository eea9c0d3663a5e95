"""KV cache events from the process that drains an engine to the one that runs it."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_semkv.contracts.identity import StableReplica
from tests.worker_connector.harness import wait_for
from tests.worker_connector.scripted import llm_args
from worker_connector.assembly import assemble_leader, assemble_rank
from worker_connector.donors import kv_event_registry as event_intake
from worker_connector.donors import kv_event_socket
from worker_connector.donors.kv_event_socket import KvEventListener, KvEventSender, event_socket_path
from worker_connector.engine_api.geometry import PoolGeometry
from worker_connector.link import local_server

EVENT = {
    "event_id": 0,
    "data": {"type": "removed", "block_hashes": [2**64 - 1, -(2**63), "ff" * 32]},
    "window_size": None,
}


class Heard:
    def __init__(self, path: Path) -> None:
        self.events: list[Any] = []
        self.listener = KvEventListener(path, self.events.extend)
        self.listener.start()


@pytest.fixture
def path(socket_folder: Path) -> Path:
    return event_socket_path("engine-a", 0, socket_folder)


@pytest.fixture
def heard(path: Path) -> Iterator[Heard]:
    found = Heard(path)
    yield found
    found.listener.close()


@pytest.fixture
def sender(path: Path) -> Iterator[KvEventSender]:
    found = KvEventSender(path)
    yield found
    found.close()


def test_events_arrive_whole_and_in_order(heard: Heard, sender: KvEventSender) -> None:
    events = [EVENT | {"event_id": n} for n in range(1000)]
    for at in range(0, 1000, 7):
        sender.send(events[at : at + 7])
    wait_for(lambda: len(heard.events) == 1000)
    assert heard.events == events


def test_events_of_before_anybody_listened_are_kept(path: Path, sender: KvEventSender) -> None:
    sender.send([EVENT])
    found = Heard(path)
    try:
        wait_for(lambda: found.events == [EVENT])
    finally:
        found.listener.close()


def test_too_many_of_them_lose_the_oldest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_socket, "MAX_WAITING", 5)
    sender = KvEventSender(path)
    sender.send([EVENT | {"event_id": n} for n in range(9)])
    found = Heard(path)
    try:
        wait_for(lambda: len(found.events) == 5)
        assert [event["event_id"] for event in found.events] == [4, 5, 6, 7, 8]  # a gap, as every loss is
    finally:
        sender.close()
        found.listener.close()


def test_listener_that_comes_back_is_found_again(path: Path, sender: KvEventSender) -> None:
    first = Heard(path)
    sender.send([EVENT])
    wait_for(lambda: len(first.events) == 1)
    first.listener.close()
    second = Heard(path)
    try:
        number = 1

        def arrived() -> bool:
            nonlocal number
            sender.send([EVENT | {"event_id": number}])  # the first ones may go with the old connection
            number += 1
            return bool(second.events)

        wait_for(arrived)
    finally:
        second.listener.close()


def test_what_cannot_be_said_costs_itself_only(heard: Heard, sender: KvEventSender) -> None:
    sender.send([EVENT, {"event_id": 1, "data": object()}, EVENT | {"event_id": 2}])
    wait_for(lambda: len(heard.events) == 2)
    assert sender.counts["not_events"] == 1


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff\xff", struct.pack(">I", 3) + b"\xc1xx", struct.pack(">I", 1) + b"\x05"]
)
def test_nonsense_is_disconnected_and_others_are_heard(
    path: Path, heard: Heard, sender: KvEventSender, frame: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(path))
        stranger.sendall(frame)
        assert stranger.recv(1) == b""
    assert heard.listener.counts["refused"] == 1
    sender.send([EVENT])
    wait_for(lambda: heard.events == [EVENT])


def test_only_this_user_gets_in(path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(local_server, "other_user", lambda connection: True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(path))
        assert stranger.recv(1) == b""


def test_both_ends_pass_over_a_temporary_directory_with_a_path_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    name = secrets.token_hex(8)
    found = Heard(event_socket_path(name, 65_535))
    sender = KvEventSender(event_socket_path(name, 65_535))
    try:
        sender.send([EVENT])
        wait_for(lambda: found.events == [EVENT])
    finally:
        sender.close()
        found.listener.close()


def test_listener_without_a_thread_leaves_no_socket(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OSError, match="can't start new thread"):
            Heard(path)
    assert not path.exists()


def test_directory_that_others_can_enter_is_not_used(socket_folder: Path) -> None:
    directory = event_socket_path("engine-a", 0, socket_folder).parent
    os.chmod(directory, 0o755)
    with pytest.raises(PermissionError, match="nobody else can enter"):
        event_socket_path("engine-a", 0, socket_folder)


def test_one_listener_a_name_and_a_dead_one_s_socket_is_taken_over(path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    found = Heard(path)
    try:
        with pytest.raises(OSError, match="another engine of this name"):
            Heard(path)
    finally:
        found.listener.close()
    assert not path.exists()


def test_engine_in_another_process_hears_by_its_name(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function in one process, the listener in another, as TensorRT-LLM runs by default."""
    script = (
        "import sys, threading\n"
        "from worker_connector.donors.kv_event_socket import KvEventListener, event_socket_path\n"
        "heard = threading.Event()\n"
        "def hear(events):\n"
        "    print([event['event_id'] for event in events], flush=True)\n"
        "    heard.set()\n"
        "listener = KvEventListener(event_socket_path('engine-x', 1), hear)\n"
        "listener.start()\n"
        "assert heard.wait(60)\n"
        "listener.close()\n"
    )
    monkeypatch.setenv("TMPDIR", str(socket_folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("DYN_STABLE_ROUTING_ID", "engine-x")
    monkeypatch.setattr(event_intake, "_hearers", set())
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert event_intake.observe_kv_events([EVENT | {"event_id": 7, "attention_dp_rank": 1}, EVENT]) == 2
        assert child.stdout is not None
        assert child.stdout.readline() == "[7]\n"
        assert child.wait(60) == 0
    finally:
        event_intake.close_pipes()
        if child.poll() is None:
            child.kill()
            child.wait(30)
        if child.stdout is not None:
            child.stdout.close()
    assert event_socket_path(*StableReplica("engine-x", 1)) == event_socket_path("engine-x", 1)


def test_without_a_name_there_is_nowhere_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_STABLE_ROUTING_ID", raising=False)
    monkeypatch.setattr(event_intake, "_hearers", set())
    assert event_intake.observe_kv_events([EVENT]) == 0


def test_sending_never_waits_for_a_listener_that_hangs(path: Path) -> None:
    stuck = threading.Event()
    listener = KvEventListener(path, lambda events: (stuck.wait(30), None)[1])
    listener.start()
    sender = KvEventSender(path)
    try:
        for _ in range(200):
            sender.send([EVENT] * 500)
        assert len(sender._waiting) <= kv_event_socket.MAX_WAITING
    finally:
        stuck.set()
        sender.close()
        listener.close()


@pytest.mark.parametrize("materialization", ["off", "exact"])
def test_assembled_connector_listens_whatever_it_materializes(
    materialization: str, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(socket_folder))
    args = llm_args(4)
    env = {
        "DYN_STABLE_ROUTING_ID": "engine-y",
        "SEMKV_CONNECTOR__MATERIALIZATION": materialization,
        "SEMKV_CONNECTOR__SLAB_BYTES": "1048576",
        "SEMKV_BUS__URL": "nats://127.0.0.1:1",
    }
    parts = assemble_leader(args, env)
    try:
        rank = assemble_rank(args, env)
        rank.register(PoolGeometry.from_tensor(torch.zeros(4, 1, 2, 8), 4))
        path = event_socket_path("engine-y", 0)
        wait_for(path.exists)
        sender = KvEventSender(path)
        sender.send([EVENT])
        wait_for(lambda: parts.leader.snapshot()["kv_events"].get("offered") == 1)
        sender.close()
    finally:
        parts.close()
    assert not path.exists()
