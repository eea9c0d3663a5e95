"""One text a beat, made once for all, and only while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_semkv.dashboard.broadcast import Broadcast, Full

DEADLINE = 20.0


class Maker:
    def __init__(self) -> None:
        self.made = 0
        self.fail = False

    def __call__(self) -> str:
        if self.fail:
            raise RuntimeError("no")
        self.made += 1
        return str(self.made)


async def next_of(texts: AsyncIterator[str]) -> str:
    return await asyncio.wait_for(anext(texts), DEADLINE)


@pytest.fixture
def maker() -> Maker:
    return Maker()


async def test_first_at_once_then_every_beat(maker: Maker) -> None:
    broadcast = Broadcast(maker, 0.001, 4)
    async with broadcast.watch() as texts:
        assert [await next_of(texts) for _ in range(3)] == ["1", "2", "3"]
    await broadcast.close()


async def test_nothing_is_made_while_nobody_watches(maker: Maker) -> None:
    broadcast = Broadcast(maker, 0.001, 4)
    async with broadcast.watch() as texts:
        await next_of(texts)
    for _ in range(1_000):
        if broadcast._beat is None:
            break
        await asyncio.sleep(0.005)
    assert broadcast._beat is None
    made = maker.made
    async with broadcast.watch() as texts:
        assert await next_of(texts) == str(made + 1)
        await next_of(texts)
    await broadcast.close()


async def test_a_slow_watcher_gets_the_newest_and_holds_up_nobody(maker: Maker) -> None:
    broadcast = Broadcast(maker, 0.001, 4)
    async with broadcast.watch() as slow, broadcast.watch() as quick:
        for _ in range(20):
            await next_of(quick)
        newest = maker.made
        assert int(await next_of(slow)) >= newest
    await broadcast.close()


async def test_all_watchers_share_one_text(maker: Maker) -> None:
    broadcast = Broadcast(maker, 3_600.0, 4)
    async with broadcast.watch() as one, broadcast.watch() as two:
        assert {await next_of(one), await next_of(two)} == {"1", "2"}
        assert broadcast.watchers == 2
    assert broadcast.watchers == 0
    await broadcast.close()


async def test_too_many(maker: Maker) -> None:
    broadcast = Broadcast(maker, 3_600.0, 1)
    async with broadcast.watch():
        with pytest.raises(Full):
            async with broadcast.watch():
                pass
    async with broadcast.watch():
        pass
    await broadcast.close()


async def test_close_ends_every_watch(maker: Maker) -> None:
    broadcast = Broadcast(maker, 3_600.0, 4)
    async with broadcast.watch() as texts:
        assert await next_of(texts) == "1"
        await broadcast.close()
        assert [text async for text in texts] == []


async def test_a_beat_that_fails_is_not_the_last(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    broadcast = Broadcast(maker, 0.001, 4)
    maker.fail = True
    async with broadcast.watch() as texts:
        waiting = asyncio.ensure_future(anext(texts))
        for _ in range(1_000):
            if broadcast.faults >= 5:
                break
            await asyncio.sleep(0.002)
        maker.fail = False
        assert await asyncio.wait_for(waiting, DEADLINE) == "1"
    assert broadcast.faults >= 5
    assert len(caplog.records) <= 4
    await broadcast.close()
