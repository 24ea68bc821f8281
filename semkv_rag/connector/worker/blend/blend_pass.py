"""The blend pass: fills a request's paged KV from stored chunks and computes the rest.

It runs before the step's own forward, for the prompt's tokens from the first that vLLM's prefix cache
does not hold to the end of the plan. What it does with them is in `blend_run`; here is what outlives a
blend: the model, the thread that reads, and which tokens were picked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv_rag.connector.messages import BlendStats, BlendTask
from semkv_rag.connector.threads import pool_beside_model
from semkv_rag.connector.worker.blend.blend_run import BlendRun
from semkv_rag.connector.worker.blend.span_loader import KVSource
from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.eager import EagerModel

REMEMBERED_PLANS = 4096


@dataclass(frozen=True, eq=False)
class Picked:
    """What was picked for a plan and a prompt.

    Attributes:
        rows: one tensor, or, where fewer go on from layer to layer, one for each.
        risk: the loss that was expected of it, if the selector tells.
    """

    rows: list[Tensor]
    risk: float | None


class BlendPass:
    """Runs blends on one worker, one after another.

    Args:
        model: the loaded model; the rotations of its layers are found.
        piece_tokens: the most tokens of one launch.
        layouts: of the blocks of each layer.
        total: adds up what tensor-parallel ranks have each found of their own heads, so that all pick
            the same tokens.
    """

    def __init__(
        self,
        model: EagerModel,
        piece_tokens: int,
        layouts: Sequence[BlockLayout],
        total: Callable[[Tensor], Tensor] = lambda scores: scores,
    ) -> None:
        self.model = model
        self.piece_tokens = piece_tokens
        self.layouts = layouts
        self.total = total
        self.loading = pool_beside_model(1, "semkv-load")
        # The positions that were picked, by plan and prompt. When vLLM finds the first blocks of a plan
        # in its prefix cache, only the others are blended, and they must be the ones of the first time:
        # else an answer would depend on what happened to be cached.
        self.picked: OrderedDict[bytes, Picked] = OrderedDict()

    def close(self) -> None:
        self.loading.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def run(self, task: BlendTask, sources: Mapping[str, KVSource]) -> BlendStats:
        """Fill the cache for one task.

        Raises:
            ChunkFileError: a chunk's KV cannot be read; the cache's blocks from `task.start` on are
                then undefined, and `prefill` makes them right.
        """
        began = time.perf_counter()
        run = BlendRun(self, task, sources)
        try:
            run.blend()
        finally:
            run.close()
        self._remember(task, run.picked, run.risk)
        computed = run.computed_rows / (len(self.model.layers) * len(run.positions))
        return BlendStats(
            recomputed=run.recomputed,
            charged_ratio=computed,
            load_ms=run.waited_ms,
            blend_ms=(time.perf_counter() - began) * 1000,
            risk=run.risk,
            note=run.unpromised,
        )

    @torch.inference_mode()
    def prefill(self, task: BlendTask) -> None:
        """Compute all of a task's tokens, as plain vLLM does, in pieces of its own batch size."""
        device = self.model.paged.device
        blocks = torch.tensor(task.block_ids, device=device)
        for begin in range(task.start, task.plan.covered, self.piece_tokens):
            end = min(begin + self.piece_tokens, task.plan.covered)
            positions = torch.arange(begin, end, device=device)
            self.model.fill(task.tokens[begin:end], blocks, positions)

    def recall(self, task: BlendTask) -> Picked | None:
        """The rows, counted from the task's start, that were picked the first time, or None."""
        picked = self.picked.get(task.key())
        if picked is None:
            return None
        self.picked.move_to_end(task.key())
        rows = [level[level >= task.start] - task.start for level in picked.rows]
        return Picked(rows, picked.risk)

    def _remember(self, task: BlendTask, picked: Sequence[Tensor], risk: float | None) -> None:
        """Keep the rows that a look at the KV picked, if it was out of all of the plan's tokens."""
        first = task.plan.first_inexact
        if picked and (first is None or task.start <= first):
            self.picked[task.key()] = Picked([rows + task.start for rows in picked], risk)
            while len(self.picked) > REMEMBERED_PLANS:
                self.picked.popitem(last=False)
