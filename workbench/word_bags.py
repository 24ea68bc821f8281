"""An encoder whose similarities can be foretold: bags of words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from semkv_rag.prompt_cache import CallableEncoder


def by_words(texts: Sequence[str]) -> NDArray[np.float32]:
    """Bags of words, [texts, 256]: deterministic, and similar where words are shared."""
    found = np.zeros((len(texts), 256), np.float32)
    for row, text in zip(found, texts, strict=True):
        for word in text.lower().split():
            row[hashlib.sha256(word.encode()).digest()[0]] += 1
    return found


WORDS = CallableEncoder("words", by_words)
