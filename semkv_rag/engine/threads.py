"""Threads that work beside the model, not in its way."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


def pool_beside_model(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool in a worker's process whose threads leave the model's cores to the model.

    On a CPU vLLM binds its worker to the cores of its OpenMP threads and leaves others free for work
    such as reading and writing files; a thread that the worker starts would inherit the binding and
    share the core of the model's main thread.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_unbind)


def _unbind() -> None:
    if hasattr(os, "sched_setaffinity"):  # the parent of the worker's process is not bound
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
