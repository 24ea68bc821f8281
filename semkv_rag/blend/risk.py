"""How far a blend will be from full prefill, estimated before a word is answered.

What the question attends to, times how far stored V are off, is what a blend gets wrong. The first is
known from the question's pass. Of the second the sensitivity that is stored with a chunk knows where, but
not how much: that depends on what stands before it in this prompt. The tokens that were computed again
tell: their stored and their fresh V are both known. So the estimate takes

* `left_share`: of attention times sensitivity, the share of the tokens that stay as stored;
* `change`: how far the computed tokens' V were off, as a multiple of their sensitivity, by attention;
* how many tokens are reused: the others are a little off, too, and their errors reach the answer through
  tokens that the question does not look at.

The first two are ratios, without a model's own units. At any length the loss goes with both of them; how
large it is grows with the root of the number of tokens. It was fitted to two models of different families
and prompts of 400 to 4,000 tokens. `docs/quality-real.md` says how well it holds on contexts that it was
not fitted to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOSS = 0.13
"""The loss, nats a token, of a prompt with a thousand reused tokens where all that is asked for stays as
stored and is off by its sensitivity. Above what either model loses on average, as single answers vary."""

SAMPLED = 32
"""The most computed tokens that are looked at: those with the highest scores."""
LOOKED_AT = slice(1, None, 3)
"""The layers in which they are looked at: not the first, which knows words and places only."""
WORTH = 0.5
"""Where more than this share of the reused tokens were needed, all are computed."""


def expected_loss(left_share: float, change: float, tokens: int) -> float:
    """The expected mean KL divergence from full prefill over the answer's tokens, nats a token.

    Args:
        left_share: 0 to 1.
        change: 0 and above.
        tokens: that are reused behind another context, the computed ones among them.
    """
    return LOSS * change * left_share * math.sqrt(tokens / 1000)


def left_share(weighed: Tensor, picked: Tensor) -> float:
    """The share of attention times sensitivity that stays as stored, 0 to 1.

    Args:
        weighed: [candidates], float32, attention times sensitivity.
        picked: the candidates that are computed, [picked], int64.
    """
    total = float(weighed.sum())
    return max(0.0, 1 - float(weighed[picked].sum()) / total) if total > 0 else 0.0


def needed(weighed: Tensor, scores: Tensor, change: float, promise: float) -> int:
    """How many candidates have to be computed for the expected loss to be at most `promise`, at least 1.

    All of them where it would be more than `WORTH`, or where the promise is 0.

    Args:
        weighed: [candidates], float32, attention times sensitivity.
        scores: [candidates], by which they are picked.
        promise: nats a token.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    left = 1 - weighed[order].cumsum(0) / weighed.sum().clamp_min(1e-30)
    left = left.clamp_min(0)
    enough = torch.nonzero(expected_loss(1.0, change, len(scores)) * left <= promise).flatten()
    count = int(enough[0]) + 1 if promise > 0 and len(enough) else len(scores)
    return count if count <= WORTH * len(scores) else len(scores)
