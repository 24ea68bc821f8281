"""The arguments of decoder layers, without the rows of tokens that do not go on.

Nothing is known of a model's layers but that their arguments have a token axis: vLLM's own classes pass
[tokens, hidden] and [tokens] positions; the Transformers backend passes [1, tokens, hidden] and
(cos, sin) pairs of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class RowCut:
    """Layer arguments without the rows that do not go on.

    Where rows are cut, all tensors with the token axis are. Behind that layer the hidden states come
    cut out of the layer before; what the model itself hands to every layer, such as positions, still
    has the rows of the latest launch, and is known again by being the same tensor.

    Args:
        calls: the arguments that the layer was called with, for each piece of the launched rows; the
            last piece's are the ones that come again.
        tokens: of each piece.
        rows: which of all pieces' rows go on, [rows], int64, ascending.
    """

    def __init__(self, calls: Sequence[Any], tokens: Sequence[int], rows: Tensor) -> None:
        self.rows = rows
        self._by_id: dict[int, Tensor] = {}
        self._originals: list[Any] = []  # so that their ids stay theirs
        self._whole = tokens[0] if len(tokens) == 1 else None
        self._before = 0
        self._keep: Tensor | None = None
        for leaves in zip(*(tree_leaves(call) for call in calls), strict=True):
            axis = _token_axis(leaves[-1], tokens[-1])
            if axis is not None:
                whole = leaves[0] if len(leaves) == 1 else torch.cat(leaves, axis)
                self._by_id[id(leaves[-1])] = whole.index_select(axis, rows)
                self._originals.append(leaves[-1])

    def of(self, arguments: Any) -> Any:
        """`arguments` of a layer call, cut."""
        cut = tree_map(self._leaf, arguments)
        self._keep = None
        return cut

    def narrow(self, keep: Tensor) -> None:
        """Let fewer rows go on, from the next layer call on.

        Args:
            keep: which of the rows that went on so far, [rows], int64, ascending.
        """
        self._before, self._keep = len(self.rows), keep
        for key, cut in self._by_id.items():
            axis = _token_axis(cut, self._before)
            assert axis is not None
            self._by_id[key] = cut.index_select(axis, keep)
        self.rows = self.rows[keep]

    def _leaf(self, x: Any) -> Any:
        known = self._by_id.get(id(x))
        if known is not None:
            return known
        if self._keep is not None:  # out of the layer before, which still had more rows
            axis = _token_axis(x, self._before)
            if axis is not None:
                return x.index_select(axis, self._keep)
        if self._whole is not None and self._whole != len(self.rows):
            # Made anew for each layer out of something with all rows.
            axis = _token_axis(x, self._whole)
            return x if axis is None else x.index_select(axis, self.rows)
        return x


def copy_arguments(arguments: Any) -> Any:
    """`arguments` with every tensor cloned."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, arguments)


def _token_axis(x: Any, tokens: int) -> int | None:
    """The axis of `x` that counts tokens, or None when it has none."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return None
    if x.dim() >= 2 and x.shape[0] == 1 and x.shape[1] == tokens:
        return 1
    return 0 if x.shape[0] == tokens else None
