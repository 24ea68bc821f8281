"""A run of precompute as events: told to the end, stopped by leaving, and ended though nobody listens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest

from semkv_rag.corpus import OnProgress, PrecomputeProgress, PrecomputeResult
from semkv_rag.errors import SemKVError
from semkv_rag.server import runs
from semkv_rag.server.runs import start_run

STEP = PrecomputeProgress("computing", 1, 2, 0.5)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


def goes_on(progress: PrecomputeProgress) -> None:
    """A check that stops nothing."""


def compute(tell: OnProgress) -> PrecomputeResult:
    tell(STEP)
    return PrecomputeResult(documents=2)


async def told(events: AsyncIterator[str]) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) async for event in events]


async def test_it_is_told_to_the_end(executor: ThreadPoolExecutor) -> None:
    ended = asyncio.Event()
    progress, result = await told(start_run(executor, compute, goes_on, ended.set))
    assert progress["progress"]["share"] == 0.5
    assert result["result"]["documents"] == 2
    await asyncio.wait_for(ended.wait(), 10)


async def test_what_stops_it_is_told(executor: ThreadPoolExecutor) -> None:
    def full(progress: PrecomputeProgress) -> None:
        raise SemKVError("no room")

    ended = asyncio.Event()
    (only,) = await told(start_run(executor, compute, full, ended.set))
    assert only == {"error": {"message": "no room", "type": "SemKVError"}}
    await asyncio.wait_for(ended.wait(), 10)


async def test_it_ends_though_nobody_asks_for_an_event(executor: ThreadPoolExecutor) -> None:
    ended = asyncio.Event()
    start_run(executor, compute, goes_on, ended.set)
    await asyncio.wait_for(ended.wait(), 10)


async def test_who_leaves_stops_it(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "HEARTBEAT_SECONDS", 0.01)
    go_on, stopped, ended = threading.Event(), threading.Event(), asyncio.Event()

    def long(tell: OnProgress) -> PrecomputeResult:
        go_on.wait(10)
        try:
            tell(STEP)
        except SemKVError:
            stopped.set()
            raise
        return PrecomputeResult()

    events: Any = start_run(executor, long, goes_on, ended.set)
    async with aclosing(events):
        assert await anext(events) == ":\n\n", "a silent run has a heartbeat"
    go_on.set()
    await asyncio.wait_for(ended.wait(), 10)
    assert stopped.is_set()


async def test_one_that_never_begins_ends_too() -> None:
    executor, busy, ended = ThreadPoolExecutor(1), threading.Event(), asyncio.Event()
    executor.submit(busy.wait, 10)
    events = start_run(executor, compute, goes_on, ended.set)
    executor.shutdown(wait=False, cancel_futures=True)
    busy.set()
    assert await asyncio.wait_for(told(events), 10) == []
    assert ended.is_set()
