"""Passages for questions that bring none: stored chunks that share their rare words.

BM25 (Robertson and Zaragoza, 2009, with k1 = 1.2, b = 0.75) over the chunks of a store's documents.
It stands in for the caller's own retriever, so that a store and some questions are all that is needed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from semkv_rag.quality.questions import Passage
from semkv_rag.store import KVStore

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class StoredPassages:
    """The chunks of a namespace's documents, as texts in the documents' order.

    Args:
        documents: the texts of each document's chunks.
    """

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self._texts = [text for chunks in documents for text in chunks]
        self._document = [index for index, chunks in enumerate(documents) for _ in chunks]
        self._words = [Counter(_words(text)) for text in self._texts]
        self._lengths = [words.total() for words in self._words]
        self._in = Counter(word for words in self._words for word in words)

    @classmethod
    def of(cls, store: KVStore, model: str, namespace: str, tokenizer: Any) -> StoredPassages:
        """The documents that were precomputed for `model` in `namespace`, decoded."""
        documents = []
        for source in store.sources(model, namespace):
            stored = store.tokens(model, namespace, source.chunk_ids, patient=True)
            # A chunk may be stored behind several contexts: its text stands there once.
            texts = dict.fromkeys(
                tokenizer.decode(stored[id_].tokens.tolist(), skip_special_tokens=True).strip()
                for id_ in source.chunk_ids
                if id_ in stored
            )
            documents.append([text for text in texts if text])
        return cls(documents)

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, question: str, count: int) -> list[Passage]:
        """The `count` chunks that fit best, each with its neighbours, in the documents' order.

        Neighbours, because what a chunk means is often said in the one before it.
        """
        scores = self._scores(_words(question))
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:count]
        wanted = {
            near
            for index in best
            if scores[index] > 0
            for near in (index - 1, index, index + 1)
            if 0 <= near < len(scores) and self._document[near] == self._document[index]
        }
        return [Passage(self._texts[index]) for index in sorted(wanted)]

    def _scores(self, asked: Sequence[str]) -> list[float]:
        mean = sum(self._lengths) / max(len(self._lengths), 1) or 1.0
        scores = [0.0] * len(self._texts)
        for word in set(asked):
            if not (holding := self._in[word]):
                continue
            weight = math.log(1 + (len(self._texts) - holding + 0.5) / (holding + 0.5))
            for index, words in enumerate(self._words):
                if often := words[word]:
                    usual = K1 * (1 - B + B * self._lengths[index] / mean)
                    scores[index] += weight * often * (K1 + 1) / (often + usual)
        return scores


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
