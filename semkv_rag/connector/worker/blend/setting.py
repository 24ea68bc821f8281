"""What all blends of a worker share, and what is remembered of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from semkv_rag.connector.messages import Blocks
from semkv_rag.connector.worker.blend.layer_reader import LoadingThreads
from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.sliced_model import SlicedModel

KEPT_KEYS_BYTES = 256 << 20
"""Loaded keys that are kept for a question's pass, of all blends together; others are read back."""


@dataclass(eq=False)
class BlendSetting:
    """What all blends of a worker share.

    Attributes:
        model: the loaded model; the rotations of its layers are found.
        piece_tokens: the most tokens of one launch.
        layouts: of the blocks of each layer.
        loading: the threads that load.
        in_blends: the blocks of the requests that are being blended, by request: threads write to them.
    """

    model: SlicedModel
    piece_tokens: int
    layouts: Sequence[BlockLayout]
    loading: LoadingThreads
    in_blends: dict[str, Blocks] = field(default_factory=dict)

    @property
    def blocks_in_blends(self) -> set[int]:
        """All of them."""
        return {one for blocks in self.in_blends.values() for group in blocks for one in group}

    def may_keep_keys(self, tokens: int) -> bool:
        """Whether loaded keys of so many tokens are kept; others are read back from the cache.

        Not on a device, whose memory vLLM has given to the cache, nor where a kernel writes them, nor
        where they are not all that queries fall on.
        """
        layers = self.model.layers
        per_token = sum(heads * dim for (heads, dim), _ in (one.kv_shapes for one in layers))
        itemsize = int(layers[0].attention.kv_cache.itemsize)
        bytes_ = tokens * per_token * itemsize * (len(self.in_blends) + 1)
        if self.model.paged.device.type != "cpu" or self.model.loading is not None:
            return False
        if any(one.asks_values for one in layers):
            return False
        return bytes_ <= KEPT_KEYS_BYTES


@dataclass(frozen=True, eq=False)
class Picked:
    """What was picked for a plan and a prompt.

    Attributes:
        rows: [picked], int64, counted from the prompt's start or a task's.
        risk: the loss that was expected of it, if the selector tells.
    """

    rows: Tensor
    risk: float | None
