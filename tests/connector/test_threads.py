"""Threads that leave the model's cores to the model, and compute without a team of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from vllm.platforms import current_platform

# Run as a file: the package would bring vLLM, and its threads.
THREADS = str(Path(__file__).resolve().parents[2] / "semkv_rag" / "connector" / "threads.py")

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs a second core, and a system where threads can be bound",
)


POOLS = """
    import os, runpy, sys

    def cores(name):
        pool = runpy.run_path(sys.argv[1])[name]
        return [sorted(pool(1, "test").submit(os.sched_getaffinity, 0).result()) for _ in range(2)]

    unbound = cores("pool_behind_model")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print([unbound, cores("pool_behind_model"), cores("pool_beside_model")])
"""


@pytest.mark.slow
def test_behind_the_model_its_cores_are_left_alone_beside_it_all_are_used() -> None:
    """In a process whose main thread is bound to one core: the model's. Two pools of each kind."""
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(POOLS), THREADS],
        check=True,
        capture_output=True,
        text=True,
    )
    unbound, behind, beside = json.loads(told.stdout)
    every = sorted(os.sched_getaffinity(0))
    assert unbound == [every, every], "the model is bound to no core"
    assert behind == [every[1:], every[1:]]
    assert beside == [every, every]


TEAM = '''
    import ctypes, os, runpy, sys
    from concurrent.futures import ThreadPoolExecutor
    import torch

    openmp = ctypes.CDLL(None)

    def team():
        """Runs of a parallel region, torch's threads, and cores, of the thread that calls it."""
        seen = []
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(openmp.omp_get_num_threads()))
        openmp.GOMP_parallel(run, None, 0, 0)
        return len(seen), torch.get_num_threads(), len(os.sched_getaffinity(0))

    pool = runpy.run_path(sys.argv[1])["pool_beside_model"](1, "test")
    print(*team())
    print(*ThreadPoolExecutor(1).submit(team).result())
    for _ in range(2):
        print(len(pool.submit(os.sched_getaffinity, 0).result()), *pool.submit(team).result())
    print(*team())
'''


@pytest.mark.slow
@pytest.mark.skipif(not current_platform.is_cpu(), reason="beside a GPU's model cores are free")
def test_no_openmp_team_of_its_own_and_not_bound_for_good() -> None:
    libraries = list((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries:
        pytest.skip("torch comes with another OpenMP than GNU's")
    # As vLLM starts its worker on a CPU with two cores.
    settings = {"LD_PRELOAD": str(libraries[0]), "OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": "0 1"}
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TEAM), THREADS],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    main, other, *ours, again = [
        [int(word) for word in line.split()] for line in told.stdout.splitlines()
    ]
    assert main == again == other == [2, 2, 1], "the model's, and what any thread would have"
    cores = len(os.sched_getaffinity(0))
    assert ours == [[cores, 1, 1, 1], [cores, 1, 1, cores]], "bound once, by the first computation"
