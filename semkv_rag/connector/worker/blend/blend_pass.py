"""The blend pass: fills a request's paged KV from stored chunks and computes the rest.

It runs before the step's own forward, for the prompt's tokens from the first that vLLM's prefix cache
does not hold to the end of the plan. What it does with them is in `blend_run`; here is what outlives a
blend: the model, the thread that reads, and which tokens were picked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping

import torch

from semkv_rag.connector.messages import BlendStats, BlendTask
from semkv_rag.connector.worker.blend.blend_run import BlendRun
from semkv_rag.connector.worker.blend.setting import BlendSetting, Picked
from semkv_rag.connector.worker.blend.span_loader import KVSource

REMEMBERED_PLANS = 4096


class BlendPass:
    """Runs blends on one worker, one after another.

    Attributes:
        setting: what all blends share.
        picked: the positions that a look at the KV picked, by plan and prompt. When vLLM finds the first
            blocks of a plan in its prefix cache, only the others are blended, and the same positions must
            be picked among them: else an answer would depend on what happened to be cached.
    """

    def __init__(self, setting: BlendSetting) -> None:
        self.setting = setting
        self.picked: OrderedDict[bytes, Picked] = OrderedDict()

    def close(self) -> None:
        self.setting.loading.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def run(self, task: BlendTask, sources: Mapping[str, KVSource]) -> BlendStats:
        """Fill the cache for one task.

        Raises:
            ChunkFileError: a chunk's KV cannot be read; the cache's blocks from `task.start` on are
                then undefined, and `prefill` makes them right.
        """
        began = time.perf_counter()
        run = BlendRun(self.setting, task, sources, self._recall(task))
        run.blend()
        if run.picked is not None:
            self._remember(task, Picked(run.picked, run.risk))
        layers = len(self.setting.model.layers)
        computed = run.computed_rows / (layers * len(run.rows.positions))
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
        model, most = self.setting.model, self.setting.piece_tokens
        device = model.paged.device
        blocks = torch.tensor(task.block_ids, device=device)
        for begin in range(task.start, task.plan.covered, most):
            end = min(begin + most, task.plan.covered)
            positions = torch.arange(begin, end, device=device)
            model.fill(task.tokens[begin:end], blocks, positions)

    def _recall(self, task: BlendTask) -> Picked | None:
        """What was picked the first time, the rows counted from the task's start, or None."""
        picked = self.picked.get(task.key())
        if picked is None:
            return None
        self.picked.move_to_end(task.key())
        rows = picked.rows[picked.rows >= task.start] - task.start
        return Picked(rows, picked.risk)

    def _remember(self, task: BlendTask, picked: Picked) -> None:
        """Keep what a look at the KV picked, if it was out of all of the plan's tokens."""
        first = task.plan.first_inexact
        if first is None or task.start <= first:
            self.picked[task.key()] = Picked(picked.rows + task.start, picked.risk)
            while len(self.picked) > REMEMBERED_PLANS:
                self.picked.popitem(last=False)
