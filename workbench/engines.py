"""The engines of a test session: one for each model and its arguments, started at first use.

What several files use is kept until the session ends (`get`): their tests keep apart by namespace. What
one file or test needs for itself, since it spoils its store or wants a cache of its own, is ended by it
(`own`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.engine import Engine
from workbench.inside import in_each
from workbench.settings import ARGS_OF_MODEL, ENGINE_ARGS


class Engines:
    """Engines by model and arguments.

    Args:
        folder: makes a new folder of a name, for a store.
    """

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._engines: dict[str, Engine] = {}

    def get(self, model: Path, **arguments: Any) -> Engine:
        """The session's engine for this model and these arguments, with a store of its own.

        Args:
            arguments: of `Engine`; `ENGINE_ARGS` hold where they say nothing else.
        """
        key = repr((str(model), sorted(arguments.items())))
        if key not in self._engines:
            self._engines[key] = self.own(model, **arguments)
        return self._engines[key]

    def own(self, model: Path, **arguments: Any) -> Engine:
        """A new engine with an empty store, or with that of the arguments; the caller closes it.

        Args:
            arguments: as for `get`.
        """
        if "store" not in arguments:
            arguments["store"] = self._folder(model.name)
        return Engine(model, **{**ENGINE_ARGS, **ARGS_OF_MODEL.get(model.name, {}), **arguments})

    def close(self) -> None:
        """End those that are kept."""
        while self._engines:
            self._engines.popitem()[1].close()


@contextmanager
def a_core_each(ranks: int = 2) -> Iterator[None]:
    """Ranks of an engine that is started inside are bound to one of two cores each; else the test is
    skipped."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs a core for each of two ranks")
    with pytest.MonkeyPatch.context() as patch:
        bound = "|".join(str(cores[rank % 2]) for rank in range(ranks))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
        yield


@contextmanager
def own_on_ranks(
    engines: Engines, model: Path, sizes: Mapping[str, int], **arguments: Any
) -> Iterator[Engine]:
    """A new engine of several ranks; the test is skipped where there are no two cores for them.

    Args:
        sizes: `tensor_parallel_size`, `pipeline_parallel_size` or both.
        arguments: as for `Engines.get`.
    """
    ranks = math.prod(sizes.values())
    with a_core_each(ranks), engines.own(model, **sizes, **arguments) as engine:
        in_each(engine, _make_room_between_stages)
        yield engine


def _make_room_between_stages(worker: Any) -> None:
    """What vLLM 0.32 does at start, but on a CPU with compiled models only."""
    runner = worker.model_runner
    if runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )
