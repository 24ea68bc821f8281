"""What a kernel needs to know to decode K or V by itself, on its way into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


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

    def brought(self, bring: Callable[[Tensor], Tensor]) -> Coded:
        """With its tensors where `bring` brings them."""
        scale, middle = (None if one is None else bring(one) for one in (self.scale, self.middle))
        return replace(self, codes=bring(self.codes), scale=scale, middle=middle)
