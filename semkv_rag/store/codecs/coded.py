"""What a kernel needs to know to decode K or V by itself, on its way into the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Join: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Puts tensors of the host one behind the other, along their first axis, on another device."""


@dataclass(frozen=True, eq=False)
class Coded:
    """Numbers of some tokens, [tokens, heads, dim], as `code * scale + middle`.

    Attributes:
        shape: `(heads, dim)`.
        codes: int8, float8_e4m3fn or the numbers themselves, [tokens, heads, dim]; or uint8, two codes in
            a byte, [tokens, heads * dim / 2]: the first half of a token's in the low bits. 7.5 is taken
            from each of those.
        scale: bfloat16, [groups of tokens, heads, groups of dimensions]; None for numbers themselves.
        middle: as `scale`; None is 0.
        group_tokens: tokens of a group.
        begin: the first token's number in its group.
    """

    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor | None = None
    middle: Tensor | None = None
    group_tokens: int = 1
    begin: int = 0

    def like(self, other: Coded) -> bool:
        """Whether both are coded alike, but for how many tokens they are and where they begin."""
        return (
            self.shape == other.shape
            and self.codes.dtype == other.codes.dtype
            and self.group_tokens == other.group_tokens
            and _rest(self.scale) == _rest(other.scale)
            and _rest(self.middle) == _rest(other.middle)
        )


def _rest(groups: Tensor | None) -> tuple[int, ...] | None:
    return None if groups is None else tuple(groups.shape[1:])
