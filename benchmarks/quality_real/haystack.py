"""Documents that needles are hidden in, cut into passages as a store's chunks are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semkv_rag.corpus.context import texts_before
from semkv_rag.corpus.split import split_text
from semkv_rag.reuse import token_array

LONGEST = 8192
"""Tokens that the models take."""


@dataclass(frozen=True)
class Passage:
    """A chunk and what stands before it in its document, tokens; nothing before a document's first."""

    tokens: list[int]
    left: list[int]


def in_a_row(chunks: Iterable[Sequence[int]], chunks_before: int | None = None) -> list[Passage]:
    """The chunks of one document, each with what `semkv precompute` puts before it.

    Args:
        chunks_before: only so many before each; None for what precompute puts there.
    """
    arrays = [token_array(one) for one in chunks]
    if chunks_before is None:
        before = list(texts_before(arrays, LONGEST))
    else:
        before = [
            np.concatenate((token_array([]), *arrays[max(0, number - chunks_before) : number]))
            for number in range(len(arrays))
        ]
    return [Passage(one.tolist(), left.tolist()) for one, left in zip(arrays, before, strict=True)]


class Haystack:
    """Documents that needles are hidden in, cut into chunks of `size` tokens.

    Args:
        overlap: the most tokens that a chunk has of the one before it.
        chunks_before: see `in_a_row`.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        size: int,
        overlap: int = 0,
        chunks_before: int | None = None,
    ) -> None:
        self._tokenizer, self._size, self._overlap = tokenizer, size, overlap
        self._chunks_before = chunks_before
        self.texts = {
            str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.md"))
        }

    def cut(self, text: str) -> list[Passage]:
        chunks = split_text(text, self._tokenizer, self._size, overlap=self._overlap, markdown=True)
        return in_a_row(
            [self._tokenizer.encode(one.text, add_special_tokens=False) for one in chunks],
            self._chunks_before,
        )

    def with_needles(
        self, rng: random.Random, needles: Sequence[str], passages: int, order: str
    ) -> list[Passage]:
        """`passages` chunks among which those with the needles are; each needle in a document of its own
        (`retrieved`), or all in the documents that stand behind each other (`document`)."""
        names = rng.sample(list(self.texts), k=min(len(self.texts), max(passages, len(needles))))
        if order == "document":
            run: list[Passage] = []
            sentences = [_sentences(self.texts[name]) for name in names]
            budget, parts = passages * self._size, []
            for one in sentences:
                parts.append(one)
                if sum(len(" ".join(p)) for p in parts) / 4.2 > budget:
                    break
            for place, needle in enumerate(needles):
                part = parts[place * len(parts) // len(needles)]
                part.insert(rng.randrange(1, min(len(part), 25)), needle)
            for part in parts:
                run += self.cut(" ".join(part))
            return _holding(run, [self._mark(n) for n in needles], passages)
        chosen: list[Passage] = []
        for needle, name in zip(needles, names, strict=False):
            part = _sentences(self.texts[name])
            part.insert(rng.randrange(1, len(part)), needle)
            cut = self.cut(" ".join(part))
            chosen.append(_holding(cut, [self._mark(needle)], 1)[0])
        for name in names[len(needles) : passages]:
            chosen.append(rng.choice(self.cut(self.texts[name])))
        rng.shuffle(chosen)
        return chosen

    def _mark(self, needle: str) -> Callable[[Passage], bool]:
        return lambda one: needle in self._tokenizer.decode(one.tokens)


def _holding(
    run: list[Passage], marks: Sequence[Callable[[Passage], bool]], passages: int
) -> list[Passage]:
    """`passages` of the run, in its order, those that hold a mark among them."""
    keep = {next((i for i, one in enumerate(run) if mark(one)), -1) for mark in marks} - {-1}
    if passages == 1 and not keep:
        return run[:1]
    for number in range(len(run)):
        if len(keep) >= passages:
            break
        keep.add(number)
    return [run[number] for number in sorted(keep)]


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)
