"""What a blend wants computed next, and its computation together with others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semkv_rag.connector.adapter import Adapter
from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.blend.stored_kv import LostKV
from semkv_rag.connector.worker.model.adapters import OtherAdapter
from semkv_rag.connector.worker.model.prompt_images import PromptImages
from semkv_rag.connector.worker.model.runs import breaks, longest_part
from semkv_rag.connector.worker.model.slice import NOBODY, Slice, Watcher


@dataclass(frozen=True, eq=False)
class Launch:
    """Tokens of one request.

    Attributes:
        tokens: the request's, at least up to the last position.
        blocks: the request's, in order, [groups, blocks], int64.
        positions: those that are to be computed, [tokens], int64, ascending, at least one.
        watcher: who looks on, at each piece.
        until: the layer of the model whose K and V are the last that are wanted; the last one when left
            out.
        whole: whether it is to be computed in one piece.
        borrowed: blocks behind the request's that it needs while it is computed.
        adapter: the request's; None for the model alone.
        images: the request's; None where none of its images is computed.
    """

    tokens: Sequence[int]
    blocks: Tensor
    positions: Tensor
    watcher: Watcher = NOBODY
    until: int | None = None
    whole: bool = False
    borrowed: int = 0
    adapter: Adapter | None = None
    images: PromptImages | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def runs(self) -> int:
        return len(breaks(self.positions)) + 1

    def cut(self, most_tokens: int, most_runs: int) -> tuple[Launch, Launch | None]:
        """The first of it and the rest, if any: in order, rows may be computed piece by piece, as in
        chunked prefill."""
        if self.whole:
            return self, None
        length = min(len(self), most_tokens)
        if 0 < len(self) - length < length // 4:  # no piece is left with a few tokens
            length = -(-len(self) // 2)
        length = longest_part(self.positions.cpu(), length, most_runs)
        if length == len(self):
            return self, None
        return (
            replace(self, positions=self.positions[:length]),
            replace(self, positions=self.positions[length:]),
        )


def compute(setting: BlendSetting, launches: Sequence[Launch]) -> None:
    """Compute launches of different requests in one forward.

    Args:
        launches: at least one; all with the same `until`.

    Raises:
        LostKV: a chunk's KV cannot be had, or a request's adapter.
    """
    model = setting.model
    if model.adapters is not None and sum(map(len, launches)) > model.adapters.most_tokens:
        raise LostKV("with LoRA a question may not be longer than a step of vLLM's")
    caches = [layer.attention.kv_cache for layer in model.layers]
    borrowed = [launch.borrowed for launch in launches]
    with model.paged.borrowed(caches, setting.blocks_in_blends, sum(borrowed)) as behind:
        slices = [
            Slice(
                [launch.tokens[position] for position in launch.positions.tolist()],
                torch.cat((launch.blocks, more), dim=1),
                launch.positions,
                launch.watcher,
                launch.adapter,
                launch.images,
            )
            for launch, more in zip(launches, torch.split(behind, borrowed, dim=1), strict=True)
        ]
        try:
            model.fill(slices, launches[0].until)
        except OtherAdapter as fault:
            raise LostKV(str(fault)) from fault
