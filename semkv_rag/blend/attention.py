"""What some tokens, a question's above all, attend to: softmax over given keys, squared.

What stale values do to an answer adds up by squares: each head of each question token reads its own part
of them. A mean over heads is ruled by the many that look at everything a little; the few heads that read
a fact, and look nowhere else, are lost in it. In a mean of squares they count most.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_LOGITS = 1 << 24
"""Logits that are on the device at a time: 64 MB."""


def squared_attention(
    queries: Tensor,
    keys: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    open_keys: int = 0,
) -> Tensor:
    """What each key gets in one layer, the mean over queries and heads, [keys], float32.

    Args:
        queries: [question, heads, head_dim], rotated as the keys are. Neighbouring heads share one
            of the keys' heads.
        keys: [keys, kv_heads, head_dim].
        visible: [question, keys], bool: what each question token may attend to; at least one key.
        scale: of the logits.
        softcap: logits are bounded to it by tanh; 0 for none.
        sinks: logits that take their part of the softmax and belong to no key, [heads].
        open_keys: so many keys, the first ones, are visible to all: they need no mask, which takes as
            long as the softmax.
    """
    question, heads, head_dim = queries.shape
    kv_heads, of_each = keys.shape[1], heads // keys.shape[1]
    grouped = (queries.float() * scale).view(question, kv_heads, of_each, head_dim).transpose(0, 1)
    hidden = ~visible[:, None, open_keys:]
    pooled = torch.zeros(len(keys), device=keys.device)
    for some in _heads_at_a_time(kv_heads, question * of_each * len(keys), keys.device):
        # [..., question * heads of each, keys]
        logits = grouped[some].flatten(-3, -2) @ keys.transpose(0, 1)[some].float().mT
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        of_question = logits.view(*logits.shape[:-2], question, of_each, len(keys))
        of_question[..., open_keys:].masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            own = sinks.float().view(kv_heads, 1, of_each)[some]
            own = own.expand(*own.shape[:-2], question, of_each).flatten(-2)
            logits = torch.cat((logits, own[..., None]), dim=-1)
        weights = logits.softmax(-1)[..., : len(keys)]
        pooled += weights.square_().flatten(0, -2).sum(0)
    return pooled / (question * heads)


def _heads_at_a_time(kv_heads: int, logits: int, device: torch.device) -> list[int | slice]:
    """Which of the keys' heads are looked at together.

    A CPU multiplies a stack of small matrices at half the speed of one; a device waits longer for being
    told of each than it computes.

    Args:
        logits: of a head.
    """
    if device.type == "cpu":
        return list(range(kv_heads))
    most = max(1, MOST_LOGITS // logits)
    return [slice(begin, begin + most) for begin in range(0, kv_heads, most)]


def smoothed(scores: Tensor, rank_in_span: Tensor, before: int = 1, behind: int = 1) -> Tensor:
    """The mean of each token's score and its neighbours', of its own span alone, [tokens].

    As SnapKV pools (arXiv 2404.14469, section 4.1): what stands beside an attended token is often
    read next. Beyond a span's ends scores are taken to be 0.

    Args:
        scores: [tokens].
        rank_in_span: [tokens], int64: 0 for the first token of each span.
        before, behind: how many tokens before it and behind it count.
    """
    total = scores.clone()
    for distance in range(1, min(max(before, behind), len(scores) - 1) + 1):
        joined = (rank_in_span[distance:] >= distance).to(scores)
        if distance <= before:
            total[distance:] += scores[:-distance] * joined
        if distance <= behind:
            total[:-distance] += scores[distance:] * joined
    return total / (before + behind + 1)
