"""How often the engine is asked what was captured in passing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from semkv_rag.engine import llm_capturer
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.errors import EngineError


class Asked:
    """What of vLLM a wait for a capture needs: counts how often it is asked, and then tells.

    Attributes:
        active: requests under way.
        ended: whether it was told to end.
        times: how often it was asked.
        written: the tickets that are written, told once.
    """

    def __init__(self) -> None:
        self.active = 0
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
def capturer(llm: Asked) -> Iterator[LLMCapturer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    others: dict[str, Any] = dict.fromkeys(("store", "fingerprint", "description", "gate"))
    try:
        yield LLMCapturer(cast(Any, llm), loop, **others)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_between_requests_it_is_asked_at_once() -> None:
    llm = Asked()
    with capturer(llm) as waiting:
        ticket = waiting._tickets.draw()
        llm.written = [ticket]
        captured = waiting.wait_for(ticket)
    assert captured is not None and (captured.bytes, captured.error) == (7, None)
    assert llm.times == 1


def test_under_load_it_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_capturer, "LOADED_POLL_SECONDS", 0.5)
    llm = Asked()
    llm.active = 1
    with capturer(llm) as waiting:
        tickets = [waiting._tickets.draw() for _ in range(3)]
        llm.written = list(tickets)
        began = time.monotonic()
        assert all(waiting.wait_for(ticket) for ticket in tickets)
        assert time.monotonic() - began > 0.4
    assert llm.times == 1, "once for all"


def test_once_the_load_ends_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_capturer, "LOADED_POLL_SECONDS", 60.0)
    llm = Asked()
    llm.active = 1
    with capturer(llm) as waiting:
        ticket = waiting._tickets.draw()
        llm.written = [ticket]
        ending = threading.Timer(0.3, lambda: setattr(llm, "active", 0))
        ending.start()
        assert waiting.wait_for(ticket) is not None
        ending.join()
    assert llm.times == 1


def test_an_engine_that_was_told_to_end_is_waited_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM never answers what is asked of an engine that was shut down."""
    monkeypatch.setattr(llm_capturer, "TAKE_POLL_SECONDS", 0.01)

    class Silent(Asked):
        async def collective_rpc(self, method: str) -> list[list[dict[str, Any]]]:
            self.ended = True
            await asyncio.sleep(60)
            raise AssertionError("nobody waits so long")

    with capturer(Silent()) as waiting:
        ticket = waiting._tickets.draw()
        with pytest.raises(EngineError, match="told to end"):
            waiting.wait_for(ticket)
