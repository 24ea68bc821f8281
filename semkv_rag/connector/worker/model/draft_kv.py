"""The KV of a model that drafts (speculative decoding), in the blocks that blends fill.

A model that drafts has layers of its own in vLLM's paged cache, and a blend fills the served model's
alone. What is left in these blocks is another request's, so they are filled with zeros: behind a blend
drafts are made from less, and fewer are accepted. No answer changes: vLLM keeps of the drafts what the
served model says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig

from semkv_rag.connector.messages import BlendTask
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV


class DraftKV:
    """Empties the drafting model's part of a blend's blocks; without such a model it does nothing.

    Args:
        runner: vLLM's model runner, after its KV cache was made.
        layers: the served model's.
    """

    def __init__(
        self, runner: Any, config: VllmConfig, layers: Sequence[Layer], paged: PagedKV
    ) -> None:
        self._paged = paged
        modules = config.compilation_config.static_forward_context
        served = {
            (paged.group_of(one.attention), one.attention.kv_cache.data_ptr()) for one in layers
        }
        self._caches: list[list[Tensor]] = []  # of each group
        for at, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            caches = [modules[name].kv_cache for name in group.layer_names]
            self._caches.append([one for one in caches if (at, one.data_ptr()) not in served])

    def clear(self, task: BlendTask) -> None:
        """Fill the blocks of a blend that begins with zeros."""
        size = self._paged.block_size
        held = slice(task.start // size, -(-task.plan.covered // size))
        for caches, blocks in zip(self._caches, task.block_ids, strict=True):
            if caches:
                ids = torch.tensor(blocks[held], dtype=torch.int64, device=self._paged.device)
                self._paged.clear(caches, ids)
