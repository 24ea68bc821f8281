"""Which blocks a step's blends and captures concern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from semkv_rag.connector.messages import BlendTask, CaptureTask
from semkv_rag.connector.scheduler.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StepBlocks:
    """Of one step.

    Args:
        block_size: tokens of a block.
        block_ids: a request's blocks, in order, by its id.
    """

    def __init__(self, block_size: int, block_ids: Callable[[str], list[int]]) -> None:
        self._block_size, self._block_ids = block_size, block_ids

    def blends(
        self, tasks: Iterable[BlendTask], scheduled: Mapping[str, tuple[int, int]]
    ) -> list[BlendTask]:
        """The tasks, each from where everything before it is in the cache by then."""
        filled = self._filled_by_forward(scheduled)
        return [
            replace(
                task,
                start=self._first_unfilled(task, filled),
                end=scheduled.get(task.request_id, (0, 0))[1],
            )
            for task in tasks
        ]

    def _filled_by_forward(self, scheduled: Mapping[str, tuple[int, int]]) -> set[int]:
        """The blocks that this step's own forward writes to."""
        filled: set[int] = set()
        for request_id, (begin, end) in scheduled.items():
            blocks = self._block_ids(request_id)
            filled.update(blocks[begin // self._block_size : -(-end // self._block_size)])
        return filled

    def _first_unfilled(self, task: BlendTask, filled: set[int]) -> int:
        """Where the blend must start."""
        own = task.block_ids[: task.start // self._block_size]
        shared = [index for index, block in enumerate(own) if block in filled]
        return shared[0] * self._block_size if shared else task.start

    def capture(self, tracked: TrackedRequest) -> CaptureTask:
        """The capture of a request whose prompt is whole once the step has run."""
        request, wish = tracked.request, tracked.capture
        assert wish is not None
        tracked.captured = True
        context, end = int(wish["context"]), -(-request.num_prompt_tokens // self._block_size)
        blocks = self._block_ids(request.request_id)
        return CaptureTask(
            ticket=wish["ticket"],
            chunk_id=wish["id"],
            namespace=tracked.options.namespace,
            kind=wish["kind"],
            tokens=tracked.tokens().tolist(),
            context=context,
            block_ids=blocks[context // self._block_size : end],
            role=wish.get("role", "stored"),
        )


def scheduled_ranges(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """The token positions that the coming forward computes, [begin, end), by request."""
    begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        request_id: (begin, begin + output.num_scheduled_tokens[request_id])
        for request_id, begin in begins.items()
    }
