"""How long something takes, for tests that tell linear from quadratic.

A thread's time is measured: it counts neither other processes nor other threads of this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BUDGET_SECONDS = 5.0
"""For any single text; what is bounded takes a tenth of it, what is not takes minutes."""

LONGER = 16
LINEAR = 4 * LONGER
"""A text `LONGER` times as long takes that many times as long if the time is linear, `LONGER`
squared times if it is quadratic; this is the middle of the two, by their quotients. (What no longer
fits into a processor's caches takes some times as long for each character.)"""

SHORT_SECONDS = 0.1
"""What takes less is measured too roughly for a quotient, and holds nobody up."""


def cpu_seconds(work: Callable[[], object]) -> float:
    """The processor's time that `work` takes in this thread, whatever else the machine does."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def assert_linear(prepare: Callable[[int], Callable[[], object]], length: int) -> None:
    """`prepare(length)()` takes time that is linear in `length`, on a machine of any speed."""
    shorter = cpu_seconds(prepare(length // LONGER))
    longer = cpu_seconds(prepare(length))
    assert longer < max(SHORT_SECONDS, LINEAR * shorter), f"{shorter:.2f} s, then {longer:.2f} s"
