"""Contexts with questions of their own, each a prompt: what the table of selectors is measured on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.quality import grammar, words
from workbench.quality.batches import Batch, collate
from workbench.quality.grammar import Context, Fact
from workbench.quality.network import Model

TOGETHER = 3
"""Questions that one prompt asks behind each other, where it asks several."""


@dataclass(frozen=True, eq=False)
class Questions:
    """Contexts, each with as many prompts behind it.

    Attributes:
        contexts: the batch of contexts, without questions.
        tokens: [contexts, prompts, columns]: the question, and behind it the answer's words but the
            last, given so that each next word can be read off.
        length: columns of the question itself; the answer is read off from its last one on.
        facts: what each prompt's answer is about, [contexts][prompts].
    """

    contexts: Batch
    tokens: Tensor
    length: int
    facts: list[list[Fact]]

    @property
    def positions(self) -> Tensor:
        """[contexts, columns]."""
        return self.contexts.lengths[:, None] + torch.arange(self.tokens.shape[2])

    def right(self, model: Model, last: Tensor) -> list[bool]:
        """For each prompt, whether greedy decoding gives its whole answer with its end.

        Args:
            last: the last layer's output, [contexts, prompts, columns, hidden].
        """
        guessed = model.logits(last[:, :, self.length - 1 :]).argmax(-1)
        found = []
        for row, facts in enumerate(self.facts):
            for column, fact in enumerate(facts):
                given = guessed[row, column, : len(fact.answer)].tolist()
                found.append(given == list(fact.answer))
        return found


def make_contexts(seed: int, count: int) -> list[Context]:
    """Contexts with names never trained on, in order of length, so that neighbours fill a batch well."""
    draw = random.Random(seed)
    made = [grammar.make_context(draw, held=True) for _ in range(count)]
    return sorted(made, key=lambda context: len(context.tokens))


def single(contexts: Sequence[Context], seed: int, cross: int, controls: int) -> Questions:
    """Each prompt asks one question: `cross` of each context's need another chunk, `controls` don't."""
    draw = random.Random(seed)
    facts = [_some(draw, c, True, cross) + _some(draw, c, False, controls) for c in contexts]
    return _collate(contexts, facts, [[[fact.name] for fact in each] for each in facts])


def several(contexts: Sequence[Context], seed: int) -> Questions:
    """Each prompt asks `TOGETHER` cross questions behind each other; the last is answered.

    Each context's prompts ask the same ones in turn, so that each is the last once.
    """
    draw = random.Random(seed)
    facts = [_some(draw, c, True, TOGETHER) for c in contexts]
    turns = [[each[turn + 1 :] + each[: turn + 1] for turn in range(TOGETHER)] for each in facts]
    names = [[[fact.name for fact in turn] for turn in each] for each in turns]
    return _collate(contexts, facts, names)


def _some(draw: random.Random, context: Context, cross: bool, count: int) -> list[Fact]:
    pool = [fact for fact in context.facts if fact.cross == cross]
    return draw.sample(pool, count) if len(pool) >= count else draw.choices(pool, k=count)


def _collate(
    contexts: Sequence[Context], facts: list[list[Fact]], names: list[list[list[int]]]
) -> Questions:
    rows = [
        [
            [word for name in asked for word in (words.ASK, name, words.QUESTION)]
            + [*fact.value, words.PAD][:2]
            for fact, asked in zip(each, about, strict=True)
        ]
        for each, about in zip(facts, names, strict=True)
    ]
    batch = collate([(context, ()) for context in contexts])
    return Questions(batch, torch.tensor(rows), 3 * len(names[0][0]), facts)
