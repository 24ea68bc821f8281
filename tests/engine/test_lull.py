"""Waiting for the model's steps to pause."""

from __future__ import annotations

import threading
import time

from semkv_rag.engine.lull import MOST_BYTES, Lull


def test_nothing_waits_while_no_step_runs() -> None:
    lull = Lull()
    until = lull.hold(1)
    lull.wait(until, 1)
    assert time.monotonic() < until - 1


def test_a_step_is_waited_for() -> None:
    lull = Lull()
    lull.begin_step()
    until, written = lull.hold(1), threading.Event()
    waiting = threading.Thread(target=lambda: (lull.wait(until, 1), written.set()))
    waiting.start()
    assert not written.wait(0.2)
    lull.end_step()
    assert written.wait(1.0), "before its time was up"
    waiting.join()


def test_under_load_the_wait_ends() -> None:
    lull = Lull()
    lull.begin_step()
    began = time.monotonic()
    lull.wait(began + 0.1, 0)
    assert time.monotonic() >= began + 0.1


def test_what_holds_too_much_memory_does_not_wait() -> None:
    lull = Lull()
    lull.begin_step()
    assert lull.hold(MOST_BYTES) > time.monotonic()
    assert lull.hold(1) <= time.monotonic()
    lull.wait(0, MOST_BYTES)
    assert lull.hold(1) > time.monotonic()
