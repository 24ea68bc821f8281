"""Passes results from the engine's event loop to the caller's thread or loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Submit: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
"""Runs a coroutine in the engine's loop."""


class Stream(Generic[T], Iterator[T]):
    """The parts of an answer, in any thread. They are computed from the start on, read or not.

    Closing it, or dropping it unread, aborts the request.
    """

    def __init__(self, submit: Submit, parts: AsyncIterator[T]) -> None:
        self._parts: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._pump = submit(_pump(parts, self._parts.put))

    def __next__(self) -> T:
        try:
            part = self._parts.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if part is not None:
            return part[0]
        self._parts.put(None)  # for whoever asks again
        if not self._pump.cancelled():
            self._pump.result()
        raise StopIteration

    def close(self) -> None:
        """Abort the request, if it is not done."""
        self._pump.cancel()
        self._parts.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_pump"):
            self._pump.cancel()


async def stream_async(submit: Submit, parts: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """As `Stream`, in any event loop; computed from the first part asked for on."""
    arrived: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(part: tuple[T] | None) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            loop.call_soon_threadsafe(arrived.put_nowait, part)

    pump = submit(_pump(parts, put))
    try:
        while (part := await arrived.get()) is not None:
            yield part[0]
        await asyncio.wrap_future(pump)
    finally:
        pump.cancel()


async def _pump(parts: AsyncIterator[T], put: Callable[[tuple[T] | None], None]) -> None:
    try:
        async for part in parts:
            put((part,))
    finally:
        put(None)
