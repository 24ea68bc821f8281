"""What the model is told while it learns: the answers, and on the way to them where to look.

Answers alone teach nothing in an hour: what they need first (a word knows the words before it; a
reference finds what it refers to) pays only once all of it is there. So small heads that are thrown away
later read those intermediate facts off the hidden states, and some attention heads are told where to
look. Both fade out before training ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from workbench.quality import words
from workbench.quality.batches import Asked, Batch
from workbench.quality.grammar import Carrier
from workbench.quality.network import Block, Model, rotate

BACK = (1, 2, 3)
"""How far back the first layer's first heads look."""
_REFERENT_HEAD = 3


class Probes(nn.Module):
    """Heads that read intermediate facts off hidden states; not part of the model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.value = nn.Linear(hidden, len(words.VALUES) + 1)
        self.back = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in BACK)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What is asked and told of one batch: without what a row's mask makes impossible to know."""

    batch: Batch
    carriers: list[tuple[int, Carrier]]
    asked: list[Asked]


def lesson(batch: Batch, by_chunk: list[bool]) -> Lesson:
    """`by_chunk`: rows in which chunks don't see each other, where nothing cross can be known."""
    return Lesson(
        batch,
        [(row, c) for row, c in batch.carriers if not (by_chunk[row] and c.cross)],
        [a for a in batch.asked if not (by_chunk[a.row] and a.fact.cross)],
    )


def answer_loss(model: Model, last: Tensor, told: Lesson) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of the answers' words, and how often a whole answer is right, by kind of question."""
    rows, columns, targets, owner = [], [], [], []
    for index, asked in enumerate(told.asked):
        for offset, word in enumerate(asked.fact.answer):
            rows.append(asked.row)
            columns.append(asked.column + offset)
            targets.append(word)
            owner.append(index)
    target = torch.tensor(targets)
    # Names kept for evaluation are not even told to be wrong answers.
    logits = model.logits(last[rows, columns])[:, : words.FIRST_HELD].float()
    wrong = torch.zeros(len(told.asked)).index_add_(
        0, torch.tensor(owner), (logits.argmax(-1) != target).float()
    )
    shares: dict[str, list[float]] = {}
    for asked, errors in zip(told.asked, wrong.tolist(), strict=True):
        key = f"{'x' if asked.fact.cross else 'o'}{asked.fact.depth}"
        shares.setdefault(key, []).append(float(errors == 0))
    return F.cross_entropy(logits, target), {k: sum(v) / len(v) for k, v in shares.items()}


def value_loss(states: list[Tensor], told: Lesson, probes: Probes) -> tuple[Tensor, float]:
    """Each carrier knows its word once as many layers have run as references stand before it."""
    where = torch.tensor([(row, c.position) for row, c in told.carriers])
    depth = torch.tensor([c.depth for _, c in told.carriers])
    index = torch.tensor([_value_index(c.value) for _, c in told.carriers])
    cross = torch.tensor([c.cross for _, c in told.carriers])
    layers = len(states) - 1
    loss = states[0].new_zeros(())
    known = 0.0
    for layer in range(1, layers - 1):
        due = depth <= (layer if layer < layers - 2 else 99)
        at = where[due]
        logits = probes.value(_plain(states[layer + 1][at[:, 0], at[:, 1]])).float()
        weight = torch.where(depth[due] == 0, 0.2, 1.0)
        each = F.cross_entropy(logits, index[due], reduction="none")
        loss = loss + (each * weight).sum() / weight.sum() / (layers - 2)
        if layer == layers - 2:
            known = (logits.argmax(-1) == index[due])[cross[due]].float().mean().item()
    return loss, known


def back_loss(model: Model, states: list[Tensor], told: Lesson, probes: Probes) -> Tensor:
    """After the first layer a token knows the words one, two and three before it."""
    pairs = [(row, c.position) for row, c in told.carriers if c.position >= max(BACK)]
    pairs += [(a.row, a.column) for a in told.asked]
    pairs += [(a.row, a.column + 1) for a in told.asked]
    where = torch.tensor(pairs)
    state = _plain(states[1][where[:, 0], where[:, 1]])
    table = F.normalize(model.embed_tokens.weight[: words.FIRST_HELD].detach().float(), dim=-1)
    loss = states[0].new_zeros(())
    for distance, probe in zip(BACK, probes.back, strict=True):
        target = told.batch.tokens[where[:, 0], where[:, 1] - distance]
        loss = loss + F.cross_entropy(probe(state).float() @ table.T * 4, target) / len(BACK)
    return loss


def attention_loss(
    model: Model, states: list[Tensor], told: Lesson
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of where some heads look, and how often they look there most."""
    turn = model.turn(told.batch.positions, states[0].dtype)
    loss = states[0].new_zeros(())
    seen: dict[str, float] = {}
    carriers = told.carriers

    def look(
        name: str, layer: int, head: int, pairs: list[tuple[int, int, int]], weight: float
    ) -> None:
        nonlocal loss
        if not pairs:
            return
        block = model.layers[layer]
        assert isinstance(block, Block)
        cost, hit = _look(block, states[layer], turn, told.batch, head, pairs)
        loss = loss + weight * cost
        seen[name] = hit

    for head, distance in enumerate(BACK):
        pairs = [
            (row, c.position, c.position - distance)
            for row, c in carriers
            if c.position >= distance
        ]
        look(f"b{distance}", 0, head, pairs, 0.25)
    pronouns = _pronouns(carriers, by_end=False)
    look("it", 0, _REFERENT_HEAD, pronouns, 0.25)
    told_by = [(row, c) for row, c in carriers if c.source >= 0]
    for layer in range(1, len(states) - 3):
        for head, by_end in enumerate((False, True)):
            pairs = [(row, c.position, c.source) for row, c in told_by if c.by_end is by_end]
            look(f"{'re'[by_end]}{layer}", layer, head, pairs, 0.25)
    for head in (0, 1):
        asked = [(a.row, a.column + head, a.fact.carriers[head].position) for a in told.asked]
        look(f"q{head}", len(states) - 2, head, asked, 0.5)
    return loss, seen


def pronoun_loss(
    model: Model, states: list[Tensor], told: Lesson
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of the first layer's look from `it`, and the end behind it, to the name meant."""
    turn = model.turn(told.batch.positions, states[0].dtype)
    block = model.blocks()[0]
    loss, seen = states[0].new_zeros(()), {}
    for by_end in (False, True):
        pairs = _pronouns(told.carriers, by_end)
        if pairs:
            cost, hit = _look(block, states[0], turn, told.batch, _REFERENT_HEAD, pairs)
            loss, seen[f"it{int(by_end)}"] = loss + cost, hit
    return loss, seen


def _pronouns(carriers: list[tuple[int, Carrier]], by_end: bool) -> list[tuple[int, int, int]]:
    return [
        (row, c.position, c.referent)
        for row, c in carriers
        if c.referent >= 0 and c.by_end is by_end
    ]


def layer1_loss(
    together: Tensor, apart: Tensor, batch: Batch, by_chunk: list[bool]
) -> tuple[Tensor, Tensor]:
    """How far the second layer's input tells which tokens need another chunk.

    Args:
        together, apart: [rows, split, hidden], the first layer's output, and what it would be if chunks
            did not see each other.

    Returns:
        How much it changes at tokens that need no other chunk, and how far it falls short of changing by
        `_ENOUGH` (of at most 2) at those that do. Rows in which chunks were apart anyway don't count.
    """
    change = (_plain(together) - _plain(apart)).float().square().mean(-1)
    need = torch.zeros(batch.chunks.shape, dtype=torch.bool)
    cross = [(row, c.position) for row, c in batch.carriers if c.cross]
    if cross:
        at = torch.tensor(cross)
        need[at[:, 0], at[:, 1]] = True
    counted = (batch.chunks > 0) & ~torch.tensor(by_chunk)[:, None]
    short = (_ENOUGH - change).clamp_min(0.0)
    return change[counted & ~need].mean(), short[counted & need].mean()


_ENOUGH = 0.5


def _look(
    block: Block,
    state: Tensor,
    turn: tuple[Tensor, Tensor],
    batch: Batch,
    head: int,
    pairs: list[tuple[int, int, int]],
) -> tuple[Tensor, float]:
    """`pairs`: row, the column that looks, and the context column it should look at."""
    attention = block.self_attn
    part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
    row, column, target = torch.tensor(pairs).T
    x = block.input_layernorm(state)
    cos, sin = turn[0][:, 0], turn[1][:, 0]
    split = batch.split
    query = attention.q_norm(F.linear(x, attention.q_proj.weight[part]))
    key = attention.k_norm(F.linear(x[:, :split], attention.k_proj.weight[part]))
    # The scores of all columns: that costs less than to copy keys for each pair.
    every = rotate(query, (cos, sin)) @ rotate(key, (cos[:, :split], sin[:, :split])).mT
    scores = every[row, column].float() * attention.head_dim**-0.5
    order = torch.arange(split)
    allowed = (order <= column[:, None]) & (order < batch.lengths[row][:, None])
    scores = torch.where(allowed, scores, -1e9)
    return F.cross_entropy(scores, target), (scores.argmax(-1) == target).float().mean().item()


def _plain(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _value_index(word: int) -> int:
    return len(words.VALUES) if word == words.END_OF_ANSWER else word - words.VALUES[0]
