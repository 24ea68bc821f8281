"""KV that is no number: found before it stays in the paged cache.

Stored KV is finite. But values that no model computes may overflow in the forward, and then the KV of the
tokens behind them is NaN. The next request that gets the blocks would read it, because attention kernels
also read the slots that they mask, and NaN times zero is NaN.

NaN in a token's KV spreads, layer by layer, to every token that attends to it. A step's last token
attends to all tokens before it, so its KV in the last layer tells about the whole request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semkv_rag.connector.messages import FirstForward
from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.paged import PagedKV

NO_NUMBERS = "with the stored KV the model gives no numbers"


class Spoiling:
    """Looks at the KV of blended requests behind a step's forward.

    Args:
        layouts: of each layer's blocks.
    """

    def __init__(self, paged: PagedKV, layouts: Sequence[BlockLayout]) -> None:
        self._paged = paged
        self._layouts = layouts

    def find(self, forwards: Sequence[FirstForward]) -> list[FirstForward]:
        """Those of this step's forwards that gave no numbers."""
        size, layout = self._paged.block_size, self._layouts[-1]
        cache, group = layout.attention.kv_cache, self._paged.group_of(layout.attention)
        last = [
            (one.block_ids[group][(one.end - 1) // size], (one.end - 1) % size) for one in forwards
        ]
        blocks = torch.tensor([block for block, _ in last], device=self._paged.device)
        packed = self._paged.copy_blocks([cache], blocks)
        keys, values = layout.unpack(self._paged.codes(cache, packed))
        rows = torch.tensor([index * size + row for index, (_, row) in enumerate(last)])
        both = torch.cat((keys[rows].flatten(1), values[rows].flatten(1)), dim=1)
        sound = both.float().isfinite().all(dim=1).tolist()
        return [one for one, fine in zip(forwards, sound, strict=True) if not fine]

    def clear(self, forward: FirstForward) -> set[int]:
        """Fill the blocks of a blend, and those behind it, with zeros; their ids."""
        cleared: set[int] = set()
        for group, blocks in enumerate(forward.block_ids):
            blocks = blocks[forward.start // self._paged.block_size :]
            caches = [
                layout.attention.kv_cache
                for layout in self._layouts
                if self._paged.group_of(layout.attention) == group
            ]
            self._paged.clear(caches, torch.tensor(blocks, device=self._paged.device))
            cleared.update(blocks)
        return cleared
