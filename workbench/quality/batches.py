"""Contexts and all their questions as tensors, and who may see whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.quality import words
from workbench.quality.grammar import Carrier, Context, Fact

QUESTION_LENGTH = 5
"""`ask NAME ? WORD WORD`: the last two are the answer, given so that each next word can be read off."""
HIDDEN = -1e4
"""Added to an attention score that must not count."""


@dataclass(frozen=True)
class Asked:
    """A question: about which fact, in which row, and at which column its `?` stands."""

    row: int
    fact: Fact
    column: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Several contexts side by side, with `split` columns of context and then their questions.

    Attributes:
        tokens, positions: [rows, columns], int64.
        chunks, documents: [rows, split], -1 behind a context's end.
        lengths: [rows], tokens of each context.
        question: [rows, columns - split], the question a column belongs to, -1 for none.
        question_chunk: like `question`, the chunk in which its fact is told.
        carriers: every carrier with its row.
    """

    tokens: Tensor
    positions: Tensor
    chunks: Tensor
    documents: Tensor
    lengths: Tensor
    question: Tensor
    question_chunk: Tensor
    asked: list[Asked]
    carriers: list[tuple[int, Carrier]]

    @property
    def split(self) -> int:
        return self.chunks.shape[1]


def collate(rows: Sequence[tuple[Context, Sequence[Fact]]]) -> Batch:
    """Contexts, each with the facts it is asked about."""
    split = _round_up(max(len(c.tokens) for c, _ in rows))
    behind = _round_up(max(len(asked) for _, asked in rows) * QUESTION_LENGTH)
    count = len(rows)
    tokens = torch.full((count, split + behind), words.PAD)
    positions = torch.zeros(count, split + behind, dtype=torch.int64)
    positions[:, :split] = torch.arange(split)
    chunks, documents = torch.full((count, split), -1), torch.full((count, split), -1)
    question = torch.full((count, behind), -1)
    question_chunk = torch.full((count, behind), -1)
    asked: list[Asked] = []
    carriers: list[tuple[int, Carrier]] = []
    for row, (context, facts) in enumerate(rows):
        length = len(context.tokens)
        tokens[row, :length] = torch.tensor(context.tokens)
        chunks[row, :length] = torch.tensor(context.chunks)
        documents[row, :length] = torch.tensor(context.documents)
        carriers += [(row, carrier) for fact in context.facts for carrier in fact.carriers]
        for index, fact in enumerate(facts):
            at = slice(index * QUESTION_LENGTH, (index + 1) * QUESTION_LENGTH)
            here = slice(split + at.start, split + at.stop)
            given = (*fact.value, words.PAD)[:2]
            tokens[row, here] = torch.tensor([words.ASK, fact.name, words.QUESTION, *given])
            positions[row, here] = torch.arange(length, length + QUESTION_LENGTH)
            question[row, at], question_chunk[row, at] = index, fact.chunk
            asked.append(Asked(row, fact, here.start + 2))
    lengths = torch.tensor([len(c.tokens) for c, _ in rows])
    return Batch(
        tokens, positions, chunks, documents, lengths, question, question_chunk, asked, carriers
    )


def masks(batch: Batch, groups: Tensor, hide: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What is added to attention scores: context on context, and questions on everything.

    Args:
        groups: [rows, split]: a context token sees earlier tokens of its own group (all of them, its
            document's, or its chunk's).
        hide: [rows], bool: rows in which a question sees only the chunk in which its fact is told, so
            that this chunk's tokens must carry the answer.

    Returns:
        [rows, 1, split, split] and [rows, 1, questions, columns], float32.
    """
    split, behind = batch.split, batch.question.shape[1]
    order = torch.arange(split)
    seen = (order[:, None] >= order[None, :]) & (groups[:, :, None] == groups[:, None, :])
    later = torch.arange(behind)
    own = (batch.question[:, :, None] == batch.question[:, None, :]) & (
        later[:, None] >= later[None, :]
    )
    context = (order < batch.lengths[:, None])[:, None, :].expand(-1, behind, -1)
    if hide is not None:
        same = batch.question_chunk[:, :, None] == batch.chunks[:, None, :]
        context = context & (same | ~hide[:, None, None])
    return _additive(seen), _additive(torch.cat([context, own], dim=2))


def _additive(seen: Tensor) -> Tensor:
    return torch.where(seen, 0.0, HIDDEN)[:, None]


def _round_up(count: int) -> int:
    """Few widths, so that compiled code is used again."""
    return -(-count // 16) * 16
