"""Engines on CPUs that Ray starts on one machine compute on cores of their own.

Ray counts cores and does not say which. vLLM binds its threads to cores, and engines that start at
the same moment would all choose the same ones. Whoever holds the lock on a core's file has that core;
the system takes the lock away when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
UNBOUND = "nobind"

_held: list[int] = []
"""Descriptors of the locks that this process holds, for as long as it lives."""


def bind_engine(cpus: float) -> None:
    """Have the engine that this process starts next compute on cores of its own.

    Nothing is done where `VLLM_CPU_OMP_THREADS_BIND` says which. Where too few cores are free, or an
    engine has less than one, its threads are bound to none.

    Args:
        cpus: of the engine, as Ray counts them.
    """
    if os.environ.get(BINDING, "auto") == "auto":
        cores = claim_cores(math.floor(cpus))
        os.environ[BINDING] = ",".join(map(str, cores)) or UNBOUND


def claim_cores(
    count: int, *, folder: Path | None = None, keep: Callable[[int], None] = _held.append
) -> list[int]:
    """Cores of this machine that are this process's until it ends; none if too few are free.

    Args:
        folder: where the cores' files are; one for each user of the machine unless given.
        keep: is handed the descriptor of each lock, which must stay open.

    Raises:
        OSError: the files cannot be made.
    """
    folder = folder or Path(tempfile.gettempdir(), f"semkv-cores-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    claimed: dict[int, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        if len(claimed) == count:
            break
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(folder / str(core), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            claimed[core] = lock
    if len(claimed) < count:
        for lock in claimed.values():
            os.close(lock)
        return []
    for lock in claimed.values():
        keep(lock)
    return list(claimed)
