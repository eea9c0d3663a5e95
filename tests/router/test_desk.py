"""AdviceDesk at its doors: what is no request is said to be none, and what is one gets an answer."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_semkv.router.desk import AdviceDesk
from dynamo_semkv.router.fallback import FallbackReason
from dynamo_semkv.router.runtime_errors import FailureKind, RequestFailed
from tests.router.fakes import Rig, a_call, a_request, donor_on_a1


def desk_of(rig: Rig, **more: Any) -> AdviceDesk:
    return AdviceDesk(
        rig.service,
        rig.advisor,
        rig.edge,
        rig.directory,
        config=rig.config,
        config_hash="0" * 16,
        model="m",
        **more,
    )


@pytest.mark.parametrize("request_", [[1], None, "x", 5])
async def test_what_is_no_mapping_is_an_invalid_request_that_names_the_field(request_: Any) -> None:
    with pytest.raises(RequestFailed, match=r"^request: got .* allowed: a PreprocessedRequest") as caught:
        _ = [chunk async for chunk in desk_of(Rig()).handle(request_, a_call())]
    assert caught.value.kind is FailureKind.INVALID_REQUEST


@pytest.mark.parametrize("changes", [{"extra_args": "text"}, {"extra_args": [1]}, {"routing": [1]}, {"routing": "x"}])
async def test_fields_of_another_shape_cost_no_advice(changes: dict[str, Any]) -> None:
    rig = Rig(lookup=donor_on_a1())
    (answer,) = [chunk async for chunk in desk_of(rig).handle(a_request(**changes), a_call())]
    assert answer["decision"] == "placed"
    assert answer["route_id"] in str(answer["hint"])
    assert answer["dynamo"] == {"worker_id": "22", "dp_rank": 1}
    rig.journal.check()


async def test_a_fault_of_ours_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr("dynamo_semkv.router.service.new_route_id", fails)
    rig = Rig(lookup=donor_on_a1())
    answer = await desk_of(rig).answer_body({"token_ids": list(range(1, 1025))})
    assert (answer["decision"], answer["hint"]) == ("no_advice", None)
    assert rig.fallbacks.counts == {FallbackReason.ADVICE_ERROR: 1}
