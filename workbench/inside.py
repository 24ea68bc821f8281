"""A look into the engine's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from semkv_rag.connector.adapter import Adapter
from semkv_rag.connector.messages import BlendTask, StepMetadata
from semkv_rag.engine import Engine
from semkv_rag.reuse import ReusePlan

T = TypeVar("T")


def inside(engine: Engine, function: Callable[[Any], T]) -> T:
    """What `function` returns of the first worker, called in the worker's process."""
    return in_each(engine, function)[0]


def in_each(engine: Engine, function: Callable[[Any], T]) -> list[T]:
    """What `function` returns of each worker, called in the worker's process."""
    assert engine._llm is not None
    answers: list[T] = engine._loop.call(engine._llm.collective_rpc(function))
    return answers


def process_of(engine: Engine) -> psutil.Process:
    """The engine's process, whose children are its workers."""
    worker = psutil.Process(inside(engine, lambda worker: os.getpid()))
    return worker.parents()[0]


def picked_positions(
    engine: Engine, plan: ReusePlan, prompt: list[int], adapter: Adapter | None = None
) -> list[int] | None:
    """The prompt positions that the executor picked; None when it did not look at the KV."""
    key = BlendTask("", plan, prompt[: plan.covered], (), 0, adapter=adapter).key()

    def remembered(worker: Any) -> list[int] | None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        picked = get_kv_transfer_group().executor._blend_pass.picked.get(key)
        return None if picked is None else picked.rows.tolist()

    return inside(engine, remembered)


def last_picked(engine: Engine) -> list[list[int]]:
    """The rows that each rank picked for what was blended last."""

    def remembered(worker: Any) -> list[int]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        picked = get_kv_transfer_group().executor._blend_pass.picked
        rows: list[int] = picked[next(reversed(picked))].rows.tolist()
        return rows

    return in_each(engine, remembered)


def chunks_in_memory(engine: Engine) -> list[tuple[str, str]]:
    """The chunks in the worker's memory: namespace and id, the one used longest ago first."""

    def look(worker: Any) -> list[tuple[str, str]]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        memory = get_kv_transfer_group().executor._files.memory
        assert memory.used_bytes <= memory._arena.size_bytes
        return [(key.namespace, key.chunk_id) for key in memory.chunks]

    return inside(engine, look)


@dataclass(frozen=True)
class BlendStep:
    """What a step had to do with blends.

    Attributes:
        began: how many of its own it had.
        under_way: how many went on behind it.
        idle: whether it had no forward.
        together: how many requests each forward of the blends was for.
    """

    began: int
    under_way: int
    idle: bool
    together: list[int]


@contextmanager
def blend_steps(engine: Engine) -> Iterator[list[BlendStep]]:
    """The steps inside the block that had to do with blends; filled in at its end."""

    def watch(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        executor = get_kv_transfer_group().executor
        blend, executor.blend_steps = executor._blend, []
        compute, together = executor._blend_pass.compute, []

        def counting(step: StepMetadata) -> None:
            began, idle = len(step.blends), step.idle
            had = len(executor._queue._active)
            together.clear()
            blend(step)
            if began or had:
                left = len(executor._queue._active)
                executor.blend_steps.append((began, left, idle, list(together)))

        def computing(launches: list[Any]) -> None:
            together.append(len(launches))
            compute(launches)

        executor._blend, executor._blend_pass.compute = counting, computing

    def stop(worker: Any) -> list[tuple[int, int, bool, list[int]]]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        executor = get_kv_transfer_group().executor
        del executor._blend, executor._blend_pass.compute
        seen: list[tuple[int, int, bool, list[int]]] = executor.blend_steps
        return seen

    steps: list[BlendStep] = []
    inside(engine, watch)
    try:
        yield steps
    finally:
        steps += (BlendStep(*one) for one in inside(engine, stop))


def open_chunk_files(engine: Engine) -> list[str]:
    """Paths of chunk files that the engine's process holds open."""

    def descriptors(worker: Any) -> list[str]:
        from contextlib import suppress
        from pathlib import Path

        links = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed since it was listed
                links.append(str(link.readlink()))
        return [path for path in links if ".safetensors" in path]

    return inside(engine, descriptors)


def limit_file_size(engine: Engine, size_bytes: int) -> None:
    """Let the engine's process write no file beyond this size: writing fails as on a full disk.

    -1 takes the limit away.
    """

    def limit(worker: Any) -> None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))

    inside(engine, limit)
