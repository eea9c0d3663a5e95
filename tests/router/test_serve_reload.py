"""A running `serve` process whose configuration file is edited: frontend -> router -> one scripted worker, no
broker."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.router.conftest import OpenGraph
from tests.router.graph.build import TestGraph, http_json
from tests.router.graph.processes import wait_until
from tests.router.test_serve import serve, write_config

pytestmark = pytest.mark.graph
NOWHERE = "nats://127.0.0.1:1"


def edit(g: TestGraph, mode: str, **sections: Any) -> None:
    """In one step, as an editor saves: the half-written file is a test of its own."""
    path = g.graph.directory / "semkv.yaml"
    kept = path.rename(path.with_suffix(".old"))
    new = write_config(g, NOWHERE, placement={"mode": mode}, **sections).rename(path.with_suffix(".new"))
    kept.rename(path)
    new.replace(path)


def test_modes_switch_by_editing_the_file_and_a_broken_one_keeps_the_last_good(open_graph: OpenGraph) -> None:
    with open_graph() as g:
        g.worker("a")
        router = serve(g, "r1", write_config(g, NOWHERE, placement={"mode": "shadow"}))
        page = int(router.wait_log(r"dashboard: http://127\.0\.0\.1:(\d+)").group(1))
        router.wait_log("is served by")
        g.frontend(1)

        def snapshot() -> dict[str, Any]:
            status, value = http_json(page, "/api/snapshot")
            assert status == 200
            return dict(value)

        def decided(mode: str) -> bool:
            """Whether a request is decided in this mode now."""
            assert g.chat(words=100)[0] == 200
            return f'semkv_placement_total{{mode="{mode}"' in str(http_json(page, "/metrics")[1])

        assert decided("shadow")
        first = snapshot()
        assert (first["mode"], first["reloaded_at"], first["last_reload_error"]) == ("shadow", None, None)

        edit(g, "enforce", outcome={"history_size": 77})
        wait_until("the new mode", lambda: snapshot()["mode"] == "enforce")
        assert decided("enforce")
        second = snapshot()
        assert second["config_hash"] != first["config_hash"]
        assert second["reloaded_at"] is not None
        assert second["restart_needed"] == ["outcome.history_size"]
        assert second["history_size"] != 77
        router.wait_log("takes effect only after a restart: outcome.history_size")

        edit(g, "bold")
        wait_until("the refusal", lambda: snapshot()["last_reload_error"])
        refused = snapshot()
        assert (refused["mode"], refused["config_hash"]) == ("enforce", second["config_hash"])
        assert refused["last_reload_error"] == ("placement.mode: got 'bold', allowed: off, shadow, canary, enforce")
        checks = {check["name"]: check for check in refused["readiness"]["checks"]}
        assert checks["configuration"]["level"] == "warn"
        assert "'bold'" in checks["configuration"]["detail"]
        assert g.chat(words=100)[0] == 200

        os.kill(router.pid, signal.SIGHUP)
        wait_until("the refusal, told again when asked", lambda: router.log_text().count("is not taken over") == 2)

        edit(g, "off")
        os.kill(router.pid, signal.SIGHUP)
        wait_until("the mode after a hang-up", lambda: snapshot()["mode"] == "off")
        assert snapshot()["last_reload_error"] is None
        assert g.chat(words=100)[0] == 200
        assert router.terminate(60.0) == 0


def test_a_hang_up_while_waiting_for_workers_does_not_end_it(open_graph: OpenGraph) -> None:
    with open_graph() as g:
        router = serve(g, "r1", write_config(g, NOWHERE, placement={"mode": "shadow"}))
        router.wait_log("dashboard: ")
        os.kill(router.pid, signal.SIGHUP)
        g.worker("a")
        router.wait_log("is served by")
        g.frontend(1)
        assert g.chat(words=100)[0] == 200
        assert router.terminate(60.0) == 0
