"""What the workers do in a step, and in which blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from semkv_rag.connector.adapter import Adapter
from semkv_rag.connector.messages import (
    BlendTask,
    CaptureTask,
    FirstForward,
    ReadAhead,
    StepMetadata,
)
from semkv_rag.connector.scheduler.request_blocks import RequestBlocks
from semkv_rag.connector.scheduler.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


LEAST_SHARE = 4
"""A step's blends may compute this part of its tokens, however many others it computes."""


class StepWork:
    """Makes each step's metadata.

    Args:
        block_size: tokens of a block.
        step_tokens: the most that a step computes.
        steps_at_once: so many steps are under way at most.
        blocks: of requests.
    """

    def __init__(
        self,
        block_size: int,
        step_tokens: int,
        steps_at_once: int,
        blocks: RequestBlocks,
    ) -> None:
        self._block_size, self._step_tokens = block_size, step_tokens
        self._steps_at_once, self._without_forward = steps_at_once, steps_at_once
        self._blocks = blocks

    def metadata(
        self,
        planned: list[TrackedRequest],
        blends: list[BlendTask],
        scheduled: Mapping[str, tuple[int, int]],
        requests: Mapping[str, TrackedRequest],
    ) -> StepMetadata:
        """The metadata of the coming step. Called once, after its requests were scheduled.

        Args:
            planned: the requests that got their plan since the last one.
            blends: that begin with it.
            scheduled: what its forward computes, see `scheduled_ranges`.
        """
        computed = sum(end - begin for begin, end in scheduled.values())
        self._without_forward = 0 if computed else self._without_forward + 1
        known = [
            (requests[request_id], end)
            for request_id, (_, end) in scheduled.items()
            if request_id in requests
        ]
        self._blocks.keep_for_captures(tracked for tracked, _ in known)
        return StepMetadata(
            ahead=[_ahead(one) for one in planned if one.plan is not None and one.blend is None],
            blends=blends,
            budget_tokens=max(self._step_tokens - computed, self._step_tokens // LEAST_SHARE),
            idle=self._without_forward >= self._steps_at_once,
            first_forwards=[
                self._first_forward(tracked, end)
                for tracked, end in known
                if tracked.blend is not None
            ],
            captures=[
                self._capture(tracked) for tracked, end in known if tracked.is_to_be_captured(end)
            ],
        )

    def _first_forward(self, tracked: TrackedRequest, end: int) -> FirstForward:
        """The first forward of a blended request. The step computes its tokens up to `end`."""
        task = tracked.blend
        assert task is not None
        tracked.blend = None
        return FirstForward(
            request_id=task.request_id,
            block_ids=self._blocks.of(task.request_id),
            start=task.start,
            end=end,
            chunk_ids=tuple(dict.fromkeys(span.chunk_id for span in task.plan.spans)),
        )

    def _capture(self, tracked: TrackedRequest) -> CaptureTask:
        """The capture of a request whose prompt is whole once the step has run."""
        request, wish = tracked.request, tracked.capture
        assert wish is not None
        tracked.captured = True
        context, end = int(wish["context"]), -(-request.num_prompt_tokens // self._block_size)
        blocks = self._blocks.with_kept(request.request_id)
        lora = request.lora_request
        return CaptureTask(
            ticket=wish["ticket"],
            chunk_id=wish["id"],
            model=wish["model"],
            namespace=tracked.options.namespace,
            kind=wish["kind"],
            tokens=tracked.tokens().tolist(),
            context=context,
            block_ids=tuple(group[context // self._block_size : end] for group in blocks),
            role=wish.get("role", "stored"),
            # As whoever asked for it knows the adapter; the workers say whether they have that one.
            adapter=None if lora is None else Adapter(wish.get("adapter") or "", lora),
        )


def _ahead(tracked: TrackedRequest) -> ReadAhead:
    """The chunks of a request that has its plan, but those that vLLM's prefix cache was seen to hold.

    Of one whose blend begins at once they are not read ahead: two threads at it are slower than one.
    """
    assert tracked.plan is not None
    missing = [span for span in tracked.plan.spans if span.end > tracked.in_prefix_cache]
    chunks = tuple(dict.fromkeys((span.chunk_id, span.codec) for span in missing))
    namespace = tracked.options.namespace
    return ReadAhead(tracked.request.request_id, tracked.owner.model, namespace, chunks)


def scheduled_ranges(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """The token positions that the coming forward computes, [begin, end), by request."""
    begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        request_id: (begin, begin + output.num_scheduled_tokens[request_id])
        for request_id, begin in begins.items()
    }
