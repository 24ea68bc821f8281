"""Token arrays: how prompts and chunks are held for matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenArray: TypeAlias = NDArray[np.int32]
"""Token ids, [tokens], int32."""


def token_array(tokens: Sequence[int] | TokenArray) -> TokenArray:
    """`tokens` as a contiguous int32 array.

    Raises:
        OverflowError: an id does not fit; cut to 32 bits it would equal another token's.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32:
        return np.ascontiguousarray(tokens)
    array = np.asarray(tokens, dtype=np.int64)
    if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise OverflowError("a token id does not fit into 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTokens:
    """A stored chunk's tokens, and the tokens to their left when their KV was computed.

    Attributes:
        codec: how the KV is stored.
        lossless: whether that gives the KV as it was computed; else nothing of the chunk is exact.
    """

    tokens: TokenArray
    context: TokenArray
    codec: str = "plain"
    lossless: bool = True

    @property
    def before_images(self) -> int:
        """How many of `tokens` stand before any image: the KV of those behind one has seen it."""
        if (self.context < 0).any():
            return 0
        images = self.tokens < 0
        return int(images.argmax()) if images.any() else len(self.tokens)
