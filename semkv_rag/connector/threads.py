"""Threads that work beside the model, not in its way.

On a CPU vLLM binds its worker to the cores of its OpenMP threads and leaves others free for work such as
reading and writing files. A thread that the worker starts would be in the model's way in three ways: it
inherits the binding of the model's main thread; OpenMP binds it to the model's first core when it first
computes something in parallel; and it computes on a team of threads of its own, as many as the model's,
on the model's cores. GNU's OpenMP then counts more threads than cores, and the model's own ones go to
sleep at the end of every operation instead of waiting for the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from threadpoolctl import threadpool_limits
from vllm.platforms import current_platform

from semkv_rag.connector.cores import cores_of_threads

TASKS = Path("/proc/self/task")

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Threads that compute without an OpenMP team of their own.

    Args:
        cores: those that they may use.
    """

    def __init__(self, threads: int, name: str, cores: Callable[[], set[int]]) -> None:
        super().__init__(threads, thread_name_prefix=name, initializer=_compute_alone)
        self._cores = cores

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def placed() -> T:
            # At every call: OpenMP binds a thread within the first one.
            _bind_to(self._cores())
            return fn(*args, **kwargs)

        return super().submit(placed)


def pool_beside_model(threads: int, name: str) -> Pool:
    """A pool in a worker's process whose threads may use other cores than the model's."""
    return Pool(threads, name, _all_cores)


def pool_behind_model(threads: int, name: str) -> Pool:
    """The same for work that nobody waits for: its threads keep off the model's cores.

    vLLM's engine polls for the end of a step and so looks as busy as the model: where the two have a
    core each, the scheduler would as soon have a third thread interrupt the one as the other.
    """
    return Pool(threads, name, _cores_off_model)


def beside_model() -> None:
    """Let the thread that calls it use all cores, and compute alone."""
    _compute_alone()
    _bind_to(_all_cores())


def _compute_alone() -> None:
    """Give the thread no OpenMP team on a CPU. Beside a GPU's model the cores are free for one."""
    if current_platform.is_cpu():
        torch.get_num_threads()  # sets up the thread's team now: torch would do so later otherwise
        threadpool_limits(1, user_api="openmp")  # OpenMP keeps the number for each thread


def _bind_to(cores: set[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _all_cores() -> set[int]:
    """The cores of the worker's parent, which is not bound."""
    return os.sched_getaffinity(os.getppid()) if hasattr(os, "sched_getaffinity") else set()


def _cores_off_model() -> set[int]:
    return _all_cores() - _model_cores() or _all_cores()


@cache  # asked for first before a thread of ours may itself be bound to a single core
def _model_cores() -> set[int]:
    return cores_of_threads(TASKS)
