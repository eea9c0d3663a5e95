"""Parts of the router process that need no Dynamo."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from dynamo_semkv.router import process


class LateKnowledge:
    """Replayed at the third time of asking."""

    def __init__(self) -> None:
        self.asked = 0

    async def replayed(self) -> bool:
        self.asked += 1
        return self.asked >= 3


async def test_the_collector_leaves_alone_what_was_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    knowledge: Any = LateKnowledge()
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append(("collect", knowledge.asked)))
    monkeypatch.setattr(gc, "freeze", lambda: done.append(("freeze", knowledge.asked)))
    await process._freeze_what_was_replayed(knowledge)
    assert done == [("collect", 3), ("freeze", 3)]
