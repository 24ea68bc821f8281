"""Where images stand in a prompt's tokens."""

from __future__ import annotations

import numpy as np
from vllm.multimodal.inputs import PlaceholderRange

from semkv_rag.reuse import ImageRows


def rows_of(key: str, position: PlaceholderRange, **kind: bool) -> ImageRows:
    """Where an image of this key stands, and of which kind it is; see `ImageRows`."""
    mask = position.is_embed
    inside = np.arange(position.length) if mask is None else np.flatnonzero(mask.numpy())
    return ImageRows(key, position.offset + inside.astype(np.int64), **kind)
