"""The executor class for CPUs: vLLM's own, whose processes soon sleep while they wait for each other.

vLLM's engine and its workers send each other messages through shared memory. A process that waits for a
message looks for it in a loop, for a second, before it sleeps. Beside a GPU there are cores to spare for
that. On a CPU the loop takes cores from the worker's own loaders and from other engines on the machine.
vLLM has no option for the loop. It has one for the executor class (`distributed_executor_backend`).
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

SPIN_S = 0.03
"""Until who waits for a message sleeps, if nobody else wants the core; vLLM's is a second.

A small model's decoding step is over by then: sleeping within each made it up to a tenth slower.
"""

WANTED_S = 0.0005
"""A yield that takes longer went to somebody who wants the core, and the spin ends."""

NAP_MS = 2
"""What a sleeper sleeps at most behind its last message, before it looks again."""

IDLE_S, IDLE_NAP_MS = 1.0, 50
"""When nothing has come for so long, it looks less often."""


class SemKVExecutor(MultiprocExecutor):
    """vLLM's executor of several processes, with short spins."""

    def _init_executor(self) -> None:
        spin_briefly()
        super()._init_executor()


class BriefSpin(SpinCondition):
    """How the reader of a queue waits for a message."""

    busy_loop_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, busy_loop_s=SPIN_S, **kwargs)

    def wait(self, timeout_ms: int | None = None) -> None:
        """Called again and again until there is a message; returns early.

        What wakes a sleeper may get lost: vLLM's socket for it drops what follows another closely, and
        what comes before it is subscribed to. A second of spinning hides that; here a nap ends by itself.
        """
        began = time.monotonic()
        nap = IDLE_NAP_MS if began > self.last_read + IDLE_S else NAP_MS
        super().wait(nap if timeout_ms is None else min(nap, timeout_ms))
        if began <= self.last_read + self.busy_loop_s and time.monotonic() > began + WANTED_S:
            self.busy_loop_s = 0.0

    def record_read(self) -> None:
        """Called behind each message."""
        super().record_read()
        self.busy_loop_s = SPIN_S


def spin_briefly() -> None:
    """Have this process sleep soon when it waits for messages; called before it makes its queues."""
    shm_broadcast.SpinCondition = BriefSpin
