"""Ways to choose tokens: by deviation, by chance, and by rules that look at no key or value."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import torch
from torch import Tensor

from workbench.quality import grammar, words
from workbench.quality.batches import Batch
from workbench.quality.reuse import Score


def by_deviation(batch: Batch, deviation: Tensor | None) -> Tensor:
    """CacheBlend's rule."""
    assert deviation is not None
    return deviation


def _chance(batch: Batch, seed: int) -> Tensor:
    return torch.rand(batch.chunks.shape, generator=torch.Generator().manual_seed(seed))


def by_chance(seed: int) -> Score:
    """Tokens at random."""
    return lambda batch, _: _chance(batch, seed)


def _class(token: int) -> int:
    """What a rule by token id can know of a word: names it has never met are all one."""
    if token in _PROPER:
        return words.PROPER[0]
    return words.FIRST_NAME if token >= words.FIRST_NAME else token


_PROPER = frozenset(words.PROPER + words.HELD_PROPER)
_CLASSES = torch.tensor([_class(token) for token in range(len(words.WORDS))])


@cache
def matters_by_class() -> Tensor:
    """How often a word of each class has to know a word from another chunk, [vocabulary], by counting."""
    draw = random.Random(99)
    seen: Counter[int] = Counter()
    matter: Counter[int] = Counter()
    for _ in range(1000):
        context = grammar.make_context(draw)
        seen.update(_class(token) for token in context.tokens)
        cross = [c.position for f in context.facts for c in f.carriers if c.cross]
        matter.update(_class(context.tokens[position]) for position in cross)
    share = torch.zeros(len(words.WORDS))
    for token, count in seen.items():
        share[token] = matter[token] / count
    return share


def by_token(seed: int, *, skip_first_chunk: bool) -> Score:
    """The best rule by token id: words that matter most often first; among equals by chance.

    `skip_first_chunk`: and not in the prompt's first chunk, which every blend knows to be exact.
    """

    def score(batch: Batch, _: Tensor | None) -> Tensor:
        share = matters_by_class()[_CLASSES[batch.tokens[:, : batch.split]]]
        late = (batch.chunks > 0) | torch.tensor(not skip_first_chunk)
        return share * late * 1e3 + _chance(batch, seed)

    return score


def by_token_group(group: list[int], seed: int) -> Score:
    """One group of words first, behind the prompt's first chunk; then by chance."""
    chosen = torch.zeros(len(words.WORDS))
    chosen[group] = 1.0

    def score(batch: Batch, _: Tensor | None) -> Tensor:
        mine = chosen[batch.tokens[:, : batch.split]] * (batch.chunks > 0)
        return mine * 10 + (batch.chunks > 0) * 2 + _chance(batch, seed)

    return score


def _place_in_chunk(batch: Batch) -> tuple[Tensor, Tensor]:
    """Each token's place from its chunk's first and from its last token, [rows, split], from 0."""
    same = batch.chunks[:, :, None] == batch.chunks[:, None, :]
    order = torch.arange(batch.split)
    before = (same & (order[None, :] < order[:, None])).sum(2)
    return before, same.sum(2) - 1 - before


def by_chunk_head(batch: Batch, _: Tensor | None) -> Tensor:
    """The first tokens of each chunk but the prompt's first."""
    return -_place_in_chunk(batch)[0].float() - 1e3 * (batch.chunks <= 0)


def by_chunk_tail(batch: Batch, _: Tensor | None) -> Tensor:
    """The last tokens of each chunk but the prompt's first."""
    return -_place_in_chunk(batch)[1].float() - 1e3 * (batch.chunks <= 0)


def not_in_first_chunk(seed: int) -> Score:
    """By chance, but not in the prompt's first chunk."""
    return lambda batch, _: (batch.chunks > 0) * 2 + _chance(batch, seed)


def by_truth(seed: int) -> Score:
    """Cheating: the tokens at which something has to be known that stands in another chunk."""

    def score(batch: Batch, _: Tensor | None) -> Tensor:
        scores = _chance(batch, seed)
        cross = [(row, c.position) for row, c in batch.carriers if c.cross]
        if cross:
            at = torch.tensor(cross)
            scores[at[:, 0], at[:, 1]] += 2
        return scores

    return score
