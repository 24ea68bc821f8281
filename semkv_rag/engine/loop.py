"""The event loop of an engine: in a daemon thread of its own, for callers in any thread and any loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from semkv_rag.errors import EngineError

T = TypeVar("T")


class EngineLoop:
    """Runs until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="semkv-engine", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._loop.is_running()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """What a coroutine gives, run in the loop.

        Raises:
            EngineError: the engine is closed.
        """
        if not self._loop.is_running():
            work.close()
            raise EngineError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, waited for; Ctrl-C cancels it.

        Raises:
            EngineError: the engine is closed.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        if not self._loop.is_running():
            return
        self.call(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
