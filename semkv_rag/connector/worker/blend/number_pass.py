"""A forward over the tokens behind a blend, which shows whether the stored KV gives numbers.

Values that no model computes may overflow in a forward. Where vLLM can take a running request back, the
request's first forward shows it (`spoiling`). Elsewhere the blend looks before the request is let in: it
computes the next tokens of the prompt, and vLLM computes them once more afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from semkv_rag.connector.messages import BlendTask, FirstForward
from semkv_rag.connector.worker.blend.launch import Launch
from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.blend.stored_kv import LostKV
from semkv_rag.connector.worker.model.slice import Watcher
from semkv_rag.connector.worker.spoiling import NO_NUMBERS, Spoiling


class NumberPass(Watcher):
    """Watches the tokens behind a task's."""

    def __init__(self, setting: BlendSetting, task: BlendTask) -> None:
        self._setting, self._task = setting, task
        self._behind = task.behind[: setting.piece_tokens]
        self._last: tuple[Tensor, Tensor] | None = None

    def launches(self) -> Iterator[Launch]:
        """What is computed.

        Raises:
            LostKV: they are no numbers. Nothing of them is left in the cache.
        """
        task, paged = self._task, self._setting.model.paged
        begin, end = len(task.tokens), len(task.tokens) + len(self._behind)
        held = -(-begin // paged.block_size)
        yield Launch(
            [*task.tokens, *self._behind],
            torch.tensor(task.block_ids, device=paged.device)[:, :held],
            torch.arange(begin, end, device=paged.device),
            self,
            whole=True,
            borrowed=-(-end // paged.block_size) - held,
        )
        if self._last is None or all(bool(one.isfinite().all()) for one in self._last):
            return
        chunks = tuple(dict.fromkeys(span.chunk_id for span in task.plan.spans))
        forward = FirstForward(task.request_id, task.block_ids, task.start, end, chunks)
        Spoiling(paged, self._setting.layouts).clear(forward)
        raise LostKV(NO_NUMBERS, chunks, "not_finite")

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        if index == len(self._setting.model.layers) - 1:
            self._last = keys.clone(), values.clone()
