"""Corrections of blends: off they change nothing, on they do what their formulas say."""

from __future__ import annotations

import random

import pytest
import torch

from workbench.quality import grammar, rules
from workbench.quality.batches import Batch, collate
from workbench.quality.corrections import (
    Ape,
    Correction,
    Shift,
    correct,
    divergences,
    know,
    shifted,
    tempered,
)
from workbench.quality.network import Model, Shape, rotate
from workbench.quality.reuse import Blend, blend

SMALL = grammar.Recipe(documents=(2, 2), chunks=(2, 2), sentences=(2, 3), first_roots=(1, 1))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(1)
    return Model(Shape(layers=4))


@pytest.fixture(scope="module")
def batch() -> Batch:
    draw = random.Random(2)
    contexts = [grammar.make_context(draw, SMALL, held=True) for _ in range(2)]
    return collate([(c, c.facts[-4:]) for c in contexts])


@pytest.mark.parametrize(
    "how", [Correction(), Correction(Shift(0.0, by_chunk=True), Ape(1.0, 1.0))]
)
def test_without_effect_it_is_the_blend_itself(model: Model, batch: Batch, how: Correction) -> None:
    known = know(model, batch)
    found = correct(model, known, 1, 0.3, how)
    expected, _ = blend(model, batch, known.stored, Blend(0.3, rules.by_deviation, check=1))
    at = [[a.row for a in batch.asked], [a.column for a in batch.asked]]
    torch.testing.assert_close(found[at[0], at[1]], expected[at[0], at[1]])
    assert max(divergences(model, batch, expected, found)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "how", [Correction(Shift(1.0, by_chunk=True)), Correction(ape=Ape(0.5, 0.5))]
)
def test_with_an_effect_answers_change(model: Model, batch: Batch, how: Correction) -> None:
    known = know(model, batch)
    plain = correct(model, known, 1, 0.3, Correction())
    assert max(divergences(model, batch, plain, correct(model, known, 1, 0.3, how))) > 1e-6


def test_a_shift_that_all_tokens_of_a_chunk_share_is_undone(model: Model, batch: Batch) -> None:
    """Keys are moved before they are turned; one picked token in each chunk then tells it all."""
    stored = know(model, batch).stored[2]
    draw = torch.Generator().manual_seed(4)
    rows, heads, split, size = stored[0].shape
    moves = torch.randn(2, rows, heads, int(batch.chunks.max()) + 1, size, generator=draw)
    at = batch.chunks.clamp_min(0)[:, None, :, None].expand(rows, heads, split, size)
    keys, values = (move.gather(2, at) * (at > 0) for move in moves)
    turn = model.turn(batch.positions[:, :split], torch.float32)
    fresh = (stored[0] + rotate(keys, turn), stored[1] + values)
    first = batch.chunks.diff(dim=1, prepend=torch.zeros(rows, 1, dtype=torch.int64)) > 0
    picked = first | (batch.chunks == 0)  # exact tokens count for nothing
    found = shifted(model, batch, stored, fresh, picked, Shift(1.0, by_chunk=True))
    inside = (batch.chunks >= 0)[:, None, :, None]
    for one, other in zip(found, fresh, strict=True):
        torch.testing.assert_close(one * inside, other * inside, rtol=1e-4, atol=1e-4)
    half = shifted(model, batch, stored, fresh, picked, Shift(0.5, by_chunk=True))
    torch.testing.assert_close(half[1] * inside, (stored[1] + values / 2) * inside)
    over_all = shifted(model, batch, stored, fresh, picked, Shift(1.0, by_chunk=False))
    starts = first[0].nonzero().flatten()
    mean = values[0, :, starts].mean(1)
    torch.testing.assert_close(over_all[1][0, :, -1] - stored[1][0, :, -1], mean * inside[0, 0, -1])


def test_ape_is_two_softmaxes_weighed_by_their_sums() -> None:
    draw = torch.Generator().manual_seed(3)
    scores = torch.randn(1, 1, 1, 8, generator=draw) * 3
    values = torch.randn(8, 5, generator=draw)
    reused = torch.tensor([[False, True, True, True, True, False, False, False]])
    found = tempered(scores, reused, Ape(0.7, 0.8)).softmax(-1)[0, 0, 0] @ values
    inside, outside = scores[0, 0, 0, 1:5] / 0.7, scores[0, 0, 0, [0, 5, 6, 7]]
    weight, rest = inside.exp().sum() ** 0.8, outside.exp().sum()
    mixed = weight * (inside.softmax(0) @ values[1:5]) + rest * (
        outside.softmax(0) @ values[[0, 5, 6, 7]]
    )
    torch.testing.assert_close(found, mixed / (weight + rest))
    nothing = torch.zeros(1, 8, dtype=torch.bool)
    torch.testing.assert_close(tempered(scores, nothing, Ape(0.7, 0.8)), scores)
