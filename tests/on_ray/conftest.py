"""What precompute on Ray is tested on: documents of the reader's words, and a small cluster."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.settings import READER

WORDS = [
    word
    for word in json.loads((READER / "tokenizer.json").read_text())["model"]["vocab"]
    if not word.startswith("<")
]


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen documents of a few chunks each, and one that is no text."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("docs")
    for number in range(16):
        sentences = (" ".join(rng.choices(WORDS, k=20)) + " ." for _ in range(4 + number % 5))
        (folder / f"{number:02}.txt").write_text("\n\n".join(sentences))
    (folder / "broken.txt").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    """Ray with two CPUs in this machine's processes."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as environment:
        # A process of pytest-xdist binds its engines to its own cores; Ray's are the cluster's.
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
        # Ray gives way to everything else on the machine unless told not to; tests wait for it.
        environment.setenv("RAY_worker_niceness", "0")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=128 << 20,
        )
        yield ray
        ray.shutdown()
