"""Several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from raytide.actors.engine.faults import contained

__all__ = ["merge_streams"]

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Ends when all have ended, or with the first one's error. Closing it closes them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    arrived: asyncio.Queue[T | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            came = await arrived.get()
            if not isinstance(came, _End):
                yield came
            elif came.error is not None:
                raise came.error
            else:
                open_streams -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[T, None], arrived: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                arrived.put_nowait(item)
    except BaseException as caught:
        error = contained(caught)
    arrived.put_nowait(_End(error))
