"""What else the field has found, at the same charge as the default selector; `--set field`.

* `chunk_head`: the first tokens of each chunk (EPIC, arXiv 2410.15332), alone, and four of each beside
  the default selector's;
* two stages: half is picked and computed, the question asked again over that, and the rest picked by
  what it attends to then, as ProphetKV (arXiv 2602.02579) recalls in two stages;
* one layer: the question's attention in the one layer that is two thirds up, in the place of all layers
  (the critical layer of QCFuse, arXiv 2606.05875);
* temperature: the keys that stay stale are made longer or shorter, so that what they get of attention is
  sharper or flatter (as APE, arXiv 2502.05431, does with all of a context).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from benchmarks.quality_real.outcome import Outcome
from benchmarks.quality_real.ways import Stored
from semkv_rag.blend import Candidates, pick, selector_type

if TYPE_CHECKING:
    from benchmarks.quality_real.compared import Compared

CHARGE: Final = 0.15
FIRST: Final = 4
"""Tokens of each chunk that a first-token rule computes in any case."""
LENGTHS: Final = (0.95, 1.05)
"""Of stale keys, as multiples of what they are."""


def chunk_heads(it: Compared) -> Outcome:
    """The first tokens of each chunk; nothing is asked, so the question's pass is not charged."""
    stored = it.both
    ratio = (CHARGE * stored.context.end - len(stored.fresh)) / len(stored.candidates)
    rank = stored.context.rank[stored.candidates]
    return stored.scored(-rank.float(), ratio, 0)


def first_tokens(it: Compared) -> Outcome:
    """The default selector, and the first tokens of each chunk before all others."""
    stored = it.both
    first = stored.context.rank[stored.candidates] < FIRST
    scores = it.scores + first * (it.scores.max() + 1)
    return stored.scored(scores, stored.ratio_asked(CHARGE), stored.looked[2])


def one_layer(it: Compared) -> Outcome:
    """The default selector with the attention of one layer."""
    stored = it.both
    layer = 2 * stored.network.layers // 3
    asked, _, cost = stored.looked
    alone = torch.zeros_like(asked)
    alone[layer] = asked[layer]
    scores = _scores(stored, alone, it.sensitivity)
    return stored.scored(scores, stored.ratio_asked(CHARGE), cost)


def two_stages(it: Compared) -> Outcome:
    """Half of the tokens, then the other half by what the question attends to over those."""
    stored = it.both
    _, _, cost = stored.looked
    again = len(stored.context.asked)
    count = round(
        (stored.ratio_asked(CHARGE)) * len(stored.candidates) - again
    )  # the second question is charged, too
    if count < 2:
        return stored.scored(it.scores, stored.ratio_asked(CHARGE), cost)
    half = pick(it.scores, count // 2)
    before = stored.network.rows
    cache = stored.cache.clone()
    places = torch.cat((stored.candidates[half], stored.fresh)).sort().values
    stored.network.run(stored.tokens_at(places), places, cache)
    seen = stored.attention_over(cache)
    spent = cost + stored.network.rows - before - len(places) * stored.network.layers
    scores = _scores(stored, seen, it.sensitivity)
    scores[half] = scores.max() + 1
    return stored.blended(pick(scores, count), spent)


def tempered(it: Compared, length: float) -> Outcome:
    """The default selector, the keys of what stays stale made longer or shorter."""
    stored = it.both
    changed = Stored(it.context, stored.cache.clone(), exact_first=True)
    changed.cache.keys[:, :, changed.candidates] *= length
    picked = pick(it.scores, round(stored.ratio_asked(CHARGE) * len(stored.candidates)))
    return changed.blended(picked, stored.looked[2])


def _scores(stored: Stored, attention: Tensor, sensitivity: Tensor) -> Tensor:
    rank = stored.context.rank[stored.candidates]
    given = Candidates(rank, 0, attention=attention, sensitivity=sensitivity)
    return selector_type("sensitivity_attention")().scores(given)
