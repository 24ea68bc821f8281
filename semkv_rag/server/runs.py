"""A run of precompute as server-sent events, so that the client can watch it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeAlias

from semkv_rag.corpus import OnProgress, PrecomputeProgress, PrecomputeResult
from semkv_rag.errors import SemKVError

HEARTBEAT_SECONDS = 5.0

_Events: TypeAlias = asyncio.Queue[dict[str, Any] | None]


def start_run(
    executor: Executor,
    compute: Callable[[OnProgress], PrecomputeResult],
    check: OnProgress,
    ended: Callable[[], None],
) -> AsyncIterator[str]:
    """Start a run and return its events. A client that stops reading them stops the run.

    The run starts at once, not with the first event. If the client has gone before that and reads none,
    the run goes on to its end.

    Args:
        executor: has the thread that it runs in.
        compute: does the run. It reports its progress to the function that it is given, which raises to
            stop it.
        check: is given the progress, too, and raises where the run has to stop.
        ended: called in the event loop once the run has ended, also where the executor was shut down
            before the run could start.
    """
    loop = asyncio.get_running_loop()
    events: _Events = asyncio.Queue()
    left = threading.Event()

    def put(event: dict[str, Any] | None) -> None:
        with suppress(RuntimeError):  # the server's loop is closed
            loop.call_soon_threadsafe(events.put_nowait, event)

    def tell(progress: PrecomputeProgress) -> None:
        if left.is_set():
            raise SemKVError("the run was stopped")
        check(progress)
        put({"progress": asdict(progress)})

    def work() -> None:
        try:
            put({"result": asdict(compute(tell))})
        except Exception as error:
            put({"error": {"message": str(error), "type": type(error).__name__}})

    def done(_: Future[None]) -> None:
        put(None)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ended)

    executor.submit(work).add_done_callback(done)
    return _as_events(events, left)


async def _as_events(events: _Events, left: threading.Event) -> AsyncIterator[str]:
    """A run's events as they are sent, up to None. `left` is set when nobody reads them any more."""
    try:
        while True:
            try:
                event = await asyncio.wait_for(events.get(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield ":\n\n"  # a comment, for clients that give up on a silent server
                continue
            if event is None:
                return
            yield f"data: {json.dumps(event)}\n\n"
    finally:
        left.set()
