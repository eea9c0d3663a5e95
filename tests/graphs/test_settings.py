"""What a local graph may be made of."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.config.load import build
from graphs.local.graph import LocalGraph
from graphs.local.settings import GraphSettings


def test_dynamos_own_router_stands_in_for_ours() -> None:
    settings = GraphSettings(model="tiny", router_mode="kv", routers=2)
    assert (settings.frontend_mode, settings.offers_model) == ("kv", True)
    assert LocalGraph(settings).router_names == ()
    assert GraphSettings().frontend_mode == "round-robin"
    assert not GraphSettings().offers_model
    assert GraphSettings(decode_workers=1).frontend_mode == "kv"
    assert (GraphSettings(direct=True).frontend_mode, GraphSettings(direct=True).offers_model) == ("direct", True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"router_mode": "random"}, "router_mode is 'random'; it must be one of kv, round-robin, or None"),
        ({"router_mode": "kv", "direct": True}, "direct is True"),
        ({"engine_niceness": 20}, "engine_niceness is 20; it must be 0 to 19"),
        ({"router_mode": "kv", "decode_workers": 1}, "decode_workers is 1; with router_mode it must be 0"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GraphSettings(**options)


def test_a_router_that_is_alone_tells_nobody_what_it_booked() -> None:
    def said(**options: Any) -> Any:
        return build(GraphSettings(**options).config("nats://127.0.0.1:1")).dynamo.kv_router.router_replica_sync

    assert said() is False
    assert said(decode_workers=1) is False
    assert said(routers=2) is True
    assert said(overrides={"dynamo": {"kv_router": {"router_replica_sync": True}}}) is True
