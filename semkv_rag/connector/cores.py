"""Which cores an engine on a CPU computes on, where another one runs on the same machine, and how long it
holds on to them.

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
SPINS = "GOMP_SPINCOUNT"
WAITING = "OMP_WAIT_POLICY"
FEW_SPINS = 1000
"""Some 10 µs, as long as it is from one operation of a forward to the next."""
LEFT_BY_VLLM = 2
"""Cores that vLLM keeps free for each rank with a KV connector, where it has more than these."""
PROCESSES = Path("/proc")
_ITS_PROCESSES = "VLLM::"
"""How vLLM's processes are called."""


@contextmanager
def cores_of_its_own(ranks: int) -> Iterator[None]:
    """What is started inside computes on cores that no other vLLM worker of this machine is bound to, or
    gives them up soon: `thread_settings` are in its environment.

    Two engines that start at the same moment do not see each other.

    Args:
        ranks: of the engine that is started.
    """
    settings = thread_settings(ranks)
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def thread_settings(ranks: int) -> dict[str, str]:
    """The environment variables that an engine's threads are placed by, where vLLM's choice does not do.

    * Where another worker is bound to cores, one rank is bound to the others, or to none if none is free.
    * Where OpenMP's threads have all cores, they soon sleep. GNU's OpenMP lets a thread wait for some
      3 ms before it sleeps, in case there is more to do. Where vLLM leaves a core free nobody minds.
      Where it does not, the engine's other processes wait meanwhile, and those of other engines.

    What the user sets (`VLLM_CPU_OMP_THREADS_BIND`; `GOMP_SPINCOUNT`, `OMP_WAIT_POLICY`) stays as it is.
    On a GPU, and where the system does not tell a process's cores (macOS), all is left to vLLM.

    Args:
        ranks: of the engine that is started.
    """
    if not current_platform.is_cpu() or not hasattr(os, "sched_getaffinity"):
        return {}
    bindable = ranks == 1 and os.environ.get(BINDING, "auto") == "auto"
    shortenable = not {SPINS, WAITING} & os.environ.keys()
    allowed = os.sched_getaffinity(0)
    taken = taken_cores() & allowed if bindable or shortenable else set()
    settings = {}
    if bindable and taken:
        settings[BINDING] = ",".join(map(str, sorted(allowed - taken))) or "nobind"
    if shortenable and (taken or len(allowed) <= LEFT_BY_VLLM * ranks):
        settings[SPINS] = str(FEW_SPINS)
    return settings


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
