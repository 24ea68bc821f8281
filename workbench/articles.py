"""Prompts made of pieces of the demo's articles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from workbench.settings import ROOT

Tokens = list[int]


def article_pieces(tokenizer: Any, count: int, length: int) -> list[Tokens]:
    """The articles, one behind the other, in pieces of `length` tokens."""
    folder = ROOT / "examples" / "articles"
    text = "\n\n".join(path.read_text() for path in sorted(folder.rglob("*.md")))
    tokens: Tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens, f"no articles are in {folder}"
    while len(tokens) < count * length:
        tokens += tokens
    return [tokens[begin * length : (begin + 1) * length] for begin in range(count)]


def zipf_prompts(
    tokenizer: Any, pieces: Sequence[Tokens], picked: int, seed: int
) -> Iterator[Tokens]:
    """Pieces by Zipf's law, in new orders, behind a short text and before a question.

    Args:
        picked: pieces of a prompt.
    """
    numbers = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(pieces) + 1)
    prefix = tokenizer.encode("Passages:\n", add_special_tokens=False)
    for count in itertools.count():
        indices = numbers.choice(len(pieces), picked, replace=False, p=weights / weights.sum())
        question = f"\nQuestion {seed}.{count:05}: what do these passages have in common?\nAnswer:"
        tokens = tokenizer.encode(question, add_special_tokens=False)
        yield [*prefix, *(token for index in indices for token in pieces[index]), *tokens]
