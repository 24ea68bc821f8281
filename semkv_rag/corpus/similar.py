"""For each chunk of a corpus the other chunk that is most like it, by the tokens both have.

Cosine of TF-IDF vectors over token ids, of which the chunk that is asked about brings its `TERMS`
weightiest tokens only: they are rare ones, whose lists are short, so that a corpus of any size takes
little more than its chunks' number of look-ups. Tokens instead of sentence vectors, because the choice
is part of a chunk's identity: it must be the same on every machine, whatever extras are installed there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.reuse.windows import ragged

TERMS = 32


class MostSimilar:
    """Of a corpus; chunks of the same tokens are one, and their order does not matter.

    Args:
        chunks: of the whole corpus, [tokens] each.
    """

    def __init__(self, chunks: Iterable[TokenArray]) -> None:
        named = {token_array(tokens).tobytes(): tokens for tokens in chunks}
        self._chunks = [named[name] for name in sorted(named)]
        self._numbers = {name: number for number, name in enumerate(sorted(named))}
        counted = [np.unique(tokens, return_counts=True) for tokens in self._chunks]
        terms = np.concatenate([terms for terms, _ in counted] or [np.zeros(0, np.int32)])
        counts = np.concatenate([counts for _, counts in counted] or [np.zeros(0, np.int64)])
        self._ends = np.cumsum([len(terms) for terms, _ in counted], dtype=np.int64)
        owners = np.repeat(np.arange(len(counted)), [len(terms) for terms, _ in counted])
        _, self._terms, in_chunks = np.unique(terms, return_inverse=True, return_counts=True)
        rarity = np.log(1 + len(counted) / in_chunks)
        weights = (1 + np.log(counts)) * rarity[self._terms]
        lengths = np.sqrt(np.bincount(owners, weights**2, minlength=len(counted)))
        self._weights = weights / lengths[owners]
        # By term: who has it, and how much it weighs there.
        by_term = np.argsort(self._terms, kind="stable")
        self._owners, self._shares = owners[by_term], self._weights[by_term]
        self._first = np.cumsum(in_chunks) - in_chunks
        self._count = in_chunks

    def to(self, tokens: TokenArray) -> TokenArray | None:
        """The chunk most like `tokens`, which is one of the corpus; None if no other shares a token.

        Of equally similar ones the first in the order of their tokens' bytes.
        """
        number = self._numbers[token_array(tokens).tobytes()]
        end = int(self._ends[number])
        start = int(self._ends[number - 1]) if number else 0
        weightiest = start + np.argsort(-self._weights[start:end], kind="stable")[:TERMS]
        asked = self._terms[weightiest]
        counts = self._count[asked]
        places = ragged(self._first[asked], counts)
        scores = np.bincount(
            self._owners[places],
            self._shares[places] * np.repeat(self._weights[weightiest], counts),
            minlength=len(self._chunks),
        )
        scores[number] = 0
        best = int(np.argmax(scores))
        return self._chunks[best] if scores[best] > 0 else None
