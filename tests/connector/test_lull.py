"""Waiting until vLLM neither begins nor ends a step."""

from __future__ import annotations

import threading
import time

from semkv_rag.connector.worker.capture.lull import LULL_S, MOST_BYTES, Lull


def test_nothing_waits_while_no_step_runs() -> None:
    lull = Lull()
    until = lull.hold(1)
    lull.wait(until, 1)
    assert time.monotonic() < until - 1


def test_short_steps_are_waited_for() -> None:
    lull = Lull()
    lull.step()
    until, written = lull.hold(1), threading.Event()
    waiting = threading.Thread(target=lambda: (lull.wait(until, 1), written.set()))
    waiting.start()
    steps_end = time.monotonic() + 0.3
    last = began = time.monotonic()
    while time.monotonic() < steps_end and not written.is_set():
        lull.step()
        last = time.monotonic()
        time.sleep(LULL_S / 10)
    paused_s = time.monotonic() - last
    assert not written.is_set() or paused_s >= LULL_S, "only if this thread was held up itself"
    assert written.wait(1.0), "before its time was up"
    assert time.monotonic() - began >= LULL_S
    waiting.join()


def test_a_long_step_is_a_lull() -> None:
    lull = Lull()
    lull.step()
    until = lull.hold(1)
    lull.wait(until, 1)
    assert time.monotonic() < until - 1, "though it has not ended"


def test_under_load_the_wait_ends() -> None:
    lull, ended = Lull(), threading.Event()
    lull.step()
    began = time.monotonic()

    def steps() -> None:
        while not ended.is_set() and time.monotonic() < began + 2.0:
            lull.step()
            time.sleep(LULL_S / 10)

    stepping = threading.Thread(target=steps)
    stepping.start()
    lull.wait(began + 0.1, 0)
    waited_s = time.monotonic() - began
    ended.set()
    stepping.join()
    assert waited_s < 2.0, "while there was no lull"


def test_what_holds_too_much_memory_does_not_wait() -> None:
    lull = Lull()
    lull.step()
    assert lull.hold(MOST_BYTES) > time.monotonic()
    assert lull.hold(1) <= time.monotonic()
    lull.wait(0, MOST_BYTES)
    assert lull.hold(1) > time.monotonic()
