"""Threads that work beside the model, not in its way."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from semkv_rag.connector.cores import cores_of_threads

TASKS = Path("/proc/self/task")


def pool_beside_model(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool in a worker's process whose threads may use other cores than the model's.

    On a CPU vLLM binds its worker to the cores of its OpenMP threads and leaves others free for work
    such as reading and writing files; a thread that the worker starts would inherit the binding and
    share the core of the model's main thread.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=beside_model)


def pool_behind_model(threads: int, name: str) -> ThreadPoolExecutor:
    """The same for work that nobody waits for: its threads keep off the model's cores.

    vLLM's engine polls for the end of a step and so looks as busy as the model: where the two have a
    core each, the scheduler would as soon have a third thread interrupt the one as the other.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_keep_off)


def beside_model() -> None:
    """The same for a thread that calls it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _all_cores())


def _keep_off() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _all_cores() - _model_cores() or _all_cores())


def _all_cores() -> set[int]:
    """The cores of the worker's parent, which is not bound."""
    return os.sched_getaffinity(os.getppid())


@cache  # asked for first before a thread of ours may itself be bound to a single core
def _model_cores() -> set[int]:
    return cores_of_threads(TASKS)
