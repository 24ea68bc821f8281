"""What all blends of a worker share, and what is remembered of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.eager import EagerModel


@dataclass(eq=False)
class BlendSetting:
    """One per worker.

    Attributes:
        model: the loaded model; the rotations of its layers are found.
        piece_tokens: the most tokens of one launch.
        layouts: of the blocks of each layer.
        total: adds up what tensor-parallel ranks have each found of their own heads, so that all pick
            the same tokens.
        loading: the thread that reads ahead.
    """

    model: EagerModel
    piece_tokens: int
    layouts: Sequence[BlockLayout]
    total: Callable[[Tensor], Tensor]
    loading: ThreadPoolExecutor


@dataclass(frozen=True, eq=False)
class Picked:
    """What was picked for a plan and a prompt.

    Attributes:
        rows: [picked], int64, counted from the prompt's start or a task's.
        risk: the loss that was expected of it, if the selector tells.
    """

    rows: Tensor
    risk: float | None
