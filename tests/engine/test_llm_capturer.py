"""How it is known what became of a capture: workers tell it, and are asked where they cannot."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from semkv_rag.connector.capture_results import CaptureResults, CaptureTeller
from semkv_rag.connector.messages import Captured
from semkv_rag.engine import llm_capturer, tickets
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.errors import EngineError


class Asked:
    """What of vLLM a wait for a capture needs: counts how often it is asked, and then tells.

    Attributes:
        ended: whether it was told to end.
        times: how often it was asked.
        written: the tickets that are written, told once.
    """

    def __init__(self) -> None:
        self.ended = False
        self.times = 0
        self.written: list[int] = []
        self.model_config: Any = type("ModelConfig", (), {"max_model_len": 64})

    def get_tokenizer(self) -> None:
        return None

    async def collective_rpc(self, method: str) -> list[list[dict[str, Any]]]:
        assert method == "semkv_take_captures"
        self.times += 1
        told, self.written = self.written, []
        return [[{"ticket": ticket, "bytes": 7, "error": None} for ticket in told]]


@contextmanager
def capturer(
    llm: Asked, results: CaptureResults | None = None, ranks: int = 1
) -> Iterator[LLMCapturer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    others: dict[str, Any] = dict.fromkeys(("store", "fingerprint", "description", "gate"))
    try:
        yield LLMCapturer(cast(Any, llm), loop, ranks=ranks, results=results, **others)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def results() -> Iterator[CaptureResults]:
    made = CaptureResults()
    yield made
    made.close()


def test_what_workers_tell_is_not_asked_for(results: CaptureResults) -> None:
    """Each of two ranks from a thread of its own, before anybody waits and while somebody does."""
    llm = Asked()
    tellers = [CaptureTeller(results.address) for _ in range(2)]
    with capturer(llm, results, ranks=2) as waiting:
        for delay_s in (0.0, 0.2):
            ticket = waiting._tickets.draw()
            told = Captured(ticket, 7)
            telling = [
                threading.Timer(delay_s, lambda one=one, told=told: one.tell(told))
                for one in tellers
            ]
            for one in telling:
                one.start()
            began = time.monotonic()
            assert waiting.wait_for(ticket) == Captured(ticket, 14)
            assert time.monotonic() - began < tickets.ASKED_S
            for one in telling:
                one.join()
        failed = waiting._tickets.draw()
        for one in tellers:
            assert one.tell(Captured(failed, 0, "no room " * 10_000))
        captured = waiting.wait_for(failed)
        assert captured is not None and captured.error is not None
        assert captured.error.startswith("no room")
    assert llm.times == 0
    assert waiting.ended == {"kept": 2, "failed": 1}


def test_what_cannot_be_told_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "ASKED_S", 0.3)
    llm = Asked()
    assert not CaptureTeller(None).tell(Captured(0, 7))
    with capturer(llm) as waiting:
        drawn = [waiting._tickets.draw() for _ in range(3)]
        llm.written = list(drawn)
        began = time.monotonic()
        assert all(waiting.wait_for(ticket) for ticket in drawn)
        assert time.monotonic() - began > 0.2
    assert llm.times == 1, "once for all"


def test_nobody_is_told_behind_the_end(results: CaptureResults) -> None:
    teller, seen = CaptureTeller(results.address), list[Any]()
    results.deliver(seen.append)
    assert teller.tell(Captured(1, 7))
    results.close()
    assert not teller.tell(Captured(2, 7))
    assert [one["ticket"] for one in seen] == [1]


def test_a_path_that_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    results = CaptureResults()
    assert results.address is None
    results.close()


def test_an_engine_that_was_told_to_end_is_waited_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM never answers what is asked of an engine that was shut down."""
    monkeypatch.setattr(llm_capturer, "TAKE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(tickets, "ASKED_S", 0.01)

    class Silent(Asked):
        async def collective_rpc(self, method: str) -> list[list[dict[str, Any]]]:
            self.ended = True
            await asyncio.sleep(60)
            raise AssertionError("nobody waits so long")

    with capturer(Silent()) as waiting:
        ticket = waiting._tickets.draw()
        with pytest.raises(EngineError, match="told to end"):
            waiting.wait_for(ticket)
