"""What the paged cache holds of some tokens, read back as K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.paged import PagedKV


@dataclass(frozen=True, eq=False)
class ReadBack:
    """Reads tokens of one request.

    Whole blocks are copied to read some of their tokens: their layout is the attention backend's own.

    Attributes:
        layouts: of each layer's blocks.
        blocks: the request's, [groups, blocks], int64.
        positions: of the tokens, [tokens], int64, ascending.
    """

    paged: PagedKV
    layouts: Sequence[BlockLayout]
    blocks: Tensor
    positions: Tensor

    def keys(self, index: int) -> Tensor:
        """K of layer `index`, [tokens, kv_heads, head_dim]."""
        codes, rows = self._codes(index)
        return self.layouts[index].unpack_keys(codes)[rows]

    def values(self, index: int) -> Tensor:
        """V of layer `index`, [tokens, kv_heads, head_dim]."""
        codes, rows = self._codes(index)
        return self.layouts[index].unpack_values(codes)[rows]

    def both(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of layer `index`, each [tokens, kv_heads, head_dim]."""
        codes, rows = self._codes(index)
        keys, values = self.layouts[index].unpack(codes)
        return keys[rows], values[rows]

    def _codes(self, index: int) -> tuple[Tensor, Tensor]:
        """The codes of the tokens' blocks, and which of their rows the tokens are."""
        held, rows = self._places
        attention = self.layouts[index].attention
        cache, blocks = attention.kv_cache, self.blocks[self.paged.group_of(attention)]
        copies = self.paged.copy_blocks([cache], blocks[held])
        return self.paged.codes(cache, copies), rows

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Which of the request's blocks hold the tokens, and which of these blocks' rows they are."""
        size = self.paged.block_size
        held, place = torch.unique(self.positions // size, return_inverse=True)
        return held, place * size + self.positions % size
