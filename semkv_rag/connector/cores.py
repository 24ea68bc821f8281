"""Which cores an engine on a CPU computes on, where another one runs on the same machine.

vLLM binds its worker's threads to cores, and every engine chooses the same ones: two engines on one
machine share a core, while others are idle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm.platforms import current_platform

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
PROCESSES = Path("/proc")
_ITS_PROCESSES = "VLLM::"
"""How vLLM's processes are called."""


@contextmanager
def cores_of_its_own(ranks: int) -> Iterator[None]:
    """What is started inside computes on cores that no other vLLM worker of this machine is bound to.

    Without another one, with `VLLM_CPU_OMP_THREADS_BIND`, with several ranks or on a GPU, all is left as
    vLLM does it. Where no core is free, threads are bound to none. Two engines that start at the same
    moment do not see each other.
    """
    if not current_platform.is_cpu() or ranks > 1 or os.environ.get(BINDING, "auto") != "auto":
        yield
        return
    allowed = os.sched_getaffinity(0)
    taken = taken_cores() & allowed
    if not taken:
        yield
        return
    before = os.environ.get(BINDING)
    os.environ[BINDING] = ",".join(map(str, sorted(allowed - taken))) or "nobind"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BINDING]
        else:
            os.environ[BINDING] = before


def taken_cores() -> set[int]:
    """The cores that threads of vLLM's workers on this machine are bound to, one thread to one core."""
    cores: set[int] = set()
    for process in PROCESSES.iterdir() if PROCESSES.is_dir() else ():
        with suppress(OSError):  # it has ended, or is another user's
            if not (process / "comm").read_text().startswith(_ITS_PROCESSES):
                continue
            cores |= cores_of_threads(process / "task")
    return cores


def cores_of_threads(tasks: Path) -> set[int]:
    """The cores that a process's threads are bound to, one thread to one core.

    Args:
        tasks: the process's `task` under `/proc`.
    """
    cores: set[int] = set()
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with suppress(ProcessLookupError):  # it has ended
            bound = os.sched_getaffinity(int(task.name))
            cores |= bound if len(bound) == 1 else set()
    return cores
