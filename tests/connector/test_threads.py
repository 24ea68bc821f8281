"""Threads that leave the model's cores to the model."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Run as a file: the package would bring vLLM, and its threads.
THREADS = str(Path(__file__).resolve().parents[2] / "semkv_rag" / "connector" / "threads.py")

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs a second core, and a system where threads can be bound",
)


def cores_of_threads(pool: str, *, bound: bool) -> list[set[int]]:
    """The cores of two pools' threads in a process of its own, whose main thread is bound to one."""
    code = f"""
        import os, runpy

        pool = runpy.run_path({THREADS!r})["{pool}"]
        if {bound}:
            os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
        for _ in range(2):
            print(*pool(1, "test").submit(os.sched_getaffinity, 0).result())
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    )
    return [{int(core) for core in line.split()} for line in told.stdout.splitlines()]


@pytest.mark.slow
def test_beside_the_model_all_cores_are_used() -> None:
    every = os.sched_getaffinity(0)
    assert cores_of_threads("pool_beside_model", bound=True) == [every, every]


@pytest.mark.slow
def test_behind_the_model_its_cores_are_left_alone() -> None:
    others = os.sched_getaffinity(0) - {min(os.sched_getaffinity(0))}
    assert cores_of_threads("pool_behind_model", bound=True) == [others, others]


@pytest.mark.slow
def test_a_model_that_is_bound_to_no_core_leaves_all() -> None:
    every = os.sched_getaffinity(0)
    assert cores_of_threads("pool_behind_model", bound=False) == [every, every]
