"""Which rows the kernel for scattered rows is given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILE = 128
"""Rows of a tile, each of one token and one query head."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What the rows of a forward are, the same for all layers.

    Attributes:
        positions: [rows], int64.
        tables: each request's blocks, [requests, blocks], int32.
        tiles: first row, row behind the last one, and request of each tile, [tiles, 3], int32. The rows
            of a tile are one request's, their positions ascending.
    """

    positions: Tensor
    tables: Tensor
    tiles: Tensor


def tile_rows(group: int) -> int:
    """Tokens of a tile, for `group` query heads to a key head."""
    return max(TILE // group, 1)
