"""A dispatch as one stream of chunks, as the service takes it apart."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dynamo_semkv.router.runtime_types import Chunk, Dispatch


async def iterated(dispatch: Dispatch) -> AsyncIterator[Chunk]:
    chunk = await dispatch.first()
    try:
        while chunk is not None:
            yield chunk
            chunk = await dispatch.next()
    finally:
        await dispatch.close()
