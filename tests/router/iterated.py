"""A dispatch as one stream of chunks, as the service takes it apart."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dynamo_semkv.router.runtime_types import Chunk, Dispatch


async def iterated(dispatch: Dispatch) -> AsyncIterator[Chunk]:
    chunk = await dispatch.first()
    try:
        while chunk is not None:
            yield chunk
            try:
                chunk = await dispatch.stream.__anext__()
            except StopAsyncIteration:
                return
            except Exception as error:
                failed = dispatch.ended(error)
                if failed is None:
                    return
                raise failed from error
            dispatch.chunks += 1
            if chunk.get("finish_reason") is not None:
                dispatch.last(chunk)
    finally:
        await dispatch.close()
