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
    """`tokens` as a contiguous int32 array."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTokens:
    """A stored chunk's tokens, and the tokens to their left when their KV was computed."""

    tokens: TokenArray
    context: TokenArray
