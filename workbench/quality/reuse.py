"""Reuse in plain PyTorch: what a blend computes, without vLLM.

All rows of a batch go through every layer, and a hook puts stored keys and values in place of those a
blend would not have computed. What the rest then sees is what it sees in a blend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.quality.batches import Batch, masks
from workbench.quality.network import Hook, Model

KV = list[tuple[Tensor, Tensor]]
"""Each layer's keys and values of the context, [rows, heads, split, head_dim]."""
Score = Callable[[Batch, Tensor | None], Tensor]
"""Scores of context tokens, [rows, split]; takes the deviations at the check layer, [rows, split], if
any."""


def whole(batch: Batch) -> Tensor:
    """Groups for `masks`: every context one."""
    return torch.where(batch.chunks >= 0, 0, -1)


@torch.no_grad()
def prefill(model: Model, batch: Batch, groups: Tensor) -> tuple[Tensor, KV]:
    """The last layer's output when context tokens see their group only, and the context's KV."""
    kept: KV = []
    split = batch.split

    def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((key[:, :, :split], value[:, :, :split]))
        return key, value

    hooks: list[Hook | None] = [keep] * len(model.layers)
    states = model.states(batch.tokens, batch.positions, masks(batch, groups), hooks)
    return states[-1], kept


@dataclass(frozen=True)
class Blend:
    """How a blend goes.

    Attributes:
        ratio: how many of a context's tokens are computed, of all.
        score: the highest are computed.
        check: the layer at which deviations are taken; below it everything is computed. -1: tokens are
            picked before the first layer.
        keep_check: whether the check layer keeps all its fresh keys and values (they are there already),
            or, as published, those of the picked tokens only.
    """

    ratio: float
    score: Score
    check: int = -1
    keep_check: bool = True


@torch.no_grad()
def blend(model: Model, batch: Batch, stored: KV, how: Blend) -> tuple[Tensor, Tensor]:
    """The last layer's output, and which tokens were computed, [rows, split], bool."""
    split = batch.split
    picked = torch.zeros(batch.chunks.shape, dtype=torch.bool)
    if how.check < 0:
        picked = pick(how.score(batch, None), batch.lengths, how.ratio)

    def at(layer: int) -> Hook:
        def put(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal picked
            if layer < how.check:
                return key, value
            old_key, old_value = stored[layer]
            new_key, new_value = key[:, :, :split], value[:, :, :split]
            if layer == how.check:
                deviation = ((new_key - old_key).square() + (new_value - old_value).square()).sum(
                    (1, 3)
                )
                picked = pick(how.score(batch, deviation), batch.lengths, how.ratio)
                if how.keep_check:
                    return key, value
            fresh = picked[:, None, :, None]
            key = torch.cat([torch.where(fresh, new_key, old_key), key[:, :, split:]], dim=2)
            value = torch.cat(
                [torch.where(fresh, new_value, old_value), value[:, :, split:]], dim=2
            )
            return key, value

        return put

    hooks: list[Hook | None] = [at(layer) for layer in range(len(model.layers))]
    states = model.states(batch.tokens, batch.positions, masks(batch, whole(batch)), hooks)
    return states[-1], picked


def pick(scores: Tensor, lengths: Tensor, ratio: float) -> Tensor:
    """The `round(ratio * length)` highest of each row, [rows, split], bool."""
    picked = torch.zeros(scores.shape, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        count = round(ratio * length)
        picked[row, scores[row, :length].topk(count).indices] = True
    return picked


def right(model: Model, batch: Batch, last: Tensor) -> list[bool]:
    """For each question, whether its whole answer with its end is what greedy decoding gives.

    Each word is read off behind the right words before it: greedy decoding gives the whole answer exactly
    when each of these is right.
    """
    rows, columns, words_, owners = [], [], [], []
    for owner, asked in enumerate(batch.asked):
        for offset, word in enumerate(asked.fact.answer):
            rows.append(asked.row)
            columns.append(asked.column + offset)
            words_.append(word)
            owners.append(owner)
    guessed = model.logits(last[rows, columns]).argmax(-1)
    wrong = torch.zeros(len(batch.asked), dtype=torch.int64)
    wrong.index_add_(0, torch.tensor(owners), (guessed != torch.tensor(words_)).long())
    return [bool(w == 0) for w in wrong]
