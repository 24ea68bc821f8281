"""How long something takes, for tests that tell linear from quadratic."""

from __future__ import annotations

import time
from collections.abc import Callable

BUDGET_SECONDS = 5.0
"""For any single text; what is linear takes a tenth of it, what is not takes minutes."""


def cpu_seconds(work: Callable[[], object]) -> float:
    """The processor's time that `work` takes, whatever else the machine does."""
    started = time.process_time()
    work()
    return time.process_time() - started
