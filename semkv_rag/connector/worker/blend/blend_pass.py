"""Blends one request: fills its paged KV from stored chunks and computes the rest.

`blend_run` has one blend's steps. This module has what outlives a blend: the model, and which tokens were
picked for a prompt.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch

from semkv_rag.connector.messages import BlendStats, BlendTask
from semkv_rag.connector.worker.blend.blend_run import BlendRun
from semkv_rag.connector.worker.blend.launch import Launch, compute
from semkv_rag.connector.worker.blend.seen_tokens import seen_tokens
from semkv_rag.connector.worker.blend.setting import BlendSetting, Picked
from semkv_rag.connector.worker.blend.stored_kv import Sources
from semkv_rag.connector.worker.model.scattered import MOST_RUNS

REMEMBERED_PLANS = 4096


class BlendPass:
    """Makes blends, on one worker.

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
        self.setting.loading.close()

    def begin(self, task: BlendTask, sources: Sources) -> Blend:
        """Begin a task's blend; its stored KV loads from now on."""
        blend = Blend(self, task, BlendRun(self.setting, task, sources, self._recall(task)))
        self.setting.in_blends[task.request_id] = task.block_ids
        return blend

    def run(self, task: BlendTask, sources: Sources) -> BlendStats:
        """A whole blend.

        Raises:
            LostKV: a chunk's KV cannot be had.
        """
        blend = self.begin(task, sources)
        try:
            while blend.next() is not None:
                self.compute([blend.take(self.setting.piece_tokens, MOST_RUNS)])
            assert blend.stats is not None
            return blend.stats
        finally:
            blend.end()

    @torch.inference_mode()
    def compute(self, launches: Sequence[Launch]) -> None:
        """Compute launches of different blends in one forward; see `launch.compute`."""
        compute(self.setting, launches)

    def _recall(self, task: BlendTask) -> Picked | None:
        """What was picked the first time, the rows counted from the task's start, or None."""
        picked = self.picked.get(task.key())
        if picked is None:
            return None
        self.picked.move_to_end(task.key())
        rows = picked.rows[picked.rows >= task.start] - task.start
        return Picked(rows, picked.risk)

    def remember(self, task: BlendTask, picked: Picked) -> None:
        """Keep what a look at the KV picked, if it was out of all of the plan's tokens."""
        first = task.plan.first_inexact
        if first is None or task.start <= first:
            self.picked[task.key()] = Picked(picked.rows + task.start, picked.risk)
            while len(self.picked) > REMEMBERED_PLANS:
                self.picked.popitem(last=False)


class Blend:
    """A blend under way.

    Attributes:
        task: what it does.
        stored: the KV that it loads.
        stats: what it did; None until it is done.
    """

    def __init__(self, owner: BlendPass, task: BlendTask, run: BlendRun) -> None:
        self._owner, self._run, self._began = owner, run, time.perf_counter()
        self._began_at = time.time()
        self._launches = run.launches()
        self._launch: Launch | None = None
        self.task, self.stored = task, run.stored
        self.stats: BlendStats | None = None

    @torch.inference_mode()
    def next(self) -> Launch | None:
        """What is to be computed next; None when the blend is done. Whatever was taken is computed.

        Raises:
            LostKV: a chunk's KV cannot be had.
        """
        if self._launch is None and self.stats is None:
            launch = next(self._launches, None)
            if launch is None:
                self._finish()
            else:
                adapter, images = self.task.adapter, self._run.rows.images
                self._launch = replace(launch, adapter=adapter, images=images)
        return self._launch

    def take(self, most_tokens: int, most_runs: int) -> Launch:
        """A piece of the next launch, which the caller computes.

        A launch that cannot be cut is not: a question is as long as it is.
        """
        assert self._launch is not None
        piece, self._launch = self._launch.cut(most_tokens, most_runs)
        return piece

    def end(self) -> None:
        """Stop, wherever it is; nothing writes to the request's blocks behind this."""
        self.stored.stop()
        self._owner.setting.in_blends.pop(self.task.request_id, None)

    def _finish(self) -> None:
        run, owner = self._run, self._owner
        if run.picked is not None:
            owner.remember(self.task, Picked(run.picked, run.risk))
        layers = owner.setting.model.ranks.layers
        self.stats = BlendStats(
            recomputed=len(run.recomputed),
            charged_ratio=run.computed_rows / (layers * len(run.rows.positions)),
            load_ms=self.stored.took_ms,
            blend_ms=(time.perf_counter() - self._began) * 1000,
            risk=run.risk,
            note=run.unpromised,
            began_at=self._began_at,
            picked_at=run.picked_at,
            seen=seen_tokens(run.rows, run.recomputed, run.scores)
            if self.task.plan.options.token_map
            else None,
        )
