"""Beyond loopback nobody is advised without the token; what is refused never reaches the route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_semkv.config.schema import SecurityConfig
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.router.guarded_route import GuardedRoute

TOKEN = "a-token-of-sixteen-or-more"


class Route:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def answer(self, body: Any) -> dict[str, Any]:
        self.asked.append(body)
        return {"route_id": "r"}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_on_loopback_no_token_is_asked_for(host: str) -> None:
    route = Route()
    guarded = GuardedRoute(route.answer, SecurityConfig(), {"DYN_SYSTEM_HOST": host})
    assert await guarded.answer({"token_ids": [1]}) == {"route_id": "r"}
    assert route.asked == [{"token_ids": [1]}]


@pytest.mark.parametrize(
    "env", [{}, {"DYN_SYSTEM_HOST": ""}, {"DYN_SYSTEM_HOST": "0.0.0.0"}, {"DYN_SYSTEM_HOST": "10.0.0.5"}]
)
async def test_elsewhere_without_a_token_nobody_is_answered_and_the_remedy_is_named(env: dict[str, str]) -> None:
    route = Route()
    guarded = GuardedRoute(route.answer, SecurityConfig(), env)
    for body in ({"token_ids": [1]}, {"token_ids": [1], "token": ""}, [], None, "x"):
        said = (await guarded.answer(body))["error"]
        assert "security.advise_token_file" in said
        assert "DYN_SYSTEM_HOST" in said
    assert route.asked == []
    assert guarded.counts == {"refused": 5}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_with_a_token_it_is_asked_for_everywhere_and_goes_no_further(host: str, file: str) -> None:
    route = Route()
    guarded = GuardedRoute(route.answer, SecurityConfig(advise_token_file=file), {"DYN_SYSTEM_HOST": host})
    for wrong in ({}, {"token": None}, {"token": TOKEN[:-1]}, {"token": [TOKEN]}, {"token": "\ud800"}, [TOKEN], None):
        said = await guarded.answer(wrong)
        assert set(said) == {"error"}
        assert TOKEN not in said["error"]
    assert route.asked == []
    assert await guarded.answer({"token_ids": [1], "token": TOKEN}) == {"route_id": "r"}
    assert route.asked == [{"token_ids": [1]}]


def test_a_bad_token_file_is_refused_by_its_field(tmp_path: Path) -> None:
    short = tmp_path / "token"
    short.write_text("short")
    for path in (short, tmp_path / "none"):
        with pytest.raises(ContractError, match=r"security\.advise_token_file") as caught:
            GuardedRoute(Route().answer, SecurityConfig(advise_token_file=str(path)), {})
        assert "got 'short'" not in str(caught.value)
