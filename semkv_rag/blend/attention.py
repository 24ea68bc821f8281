"""What some tokens, a question's above all, attend to: softmax over given keys, squared.

What stale values do to an answer adds up by squares: each head of each question token reads its own part
of them. A mean over heads is ruled by the many that look at everything a little; the few heads that read
a fact, and look nowhere else, are lost in it. In a mean of squares they count most.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    kv_heads = keys.shape[1]
    grouped = (queries.float() * scale).view(question, kv_heads, -1, head_dim)
    hidden = ~visible[:, None, open_keys:]
    pooled = torch.zeros(len(keys), device=keys.device)
    # One at a time: [question * group, keys] is the largest tensor here. Rows in one piece: CPU kernels
    # multiply a stack of small matrices at half the speed.
    for head in range(kv_heads):
        logits = grouped[:, head].reshape(-1, head_dim) @ keys[:, head].float().T
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        logits.view(question, -1, len(keys))[..., open_keys:].masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            own = sinks.float().view(kv_heads, -1)[head].repeat(question)
            logits = torch.cat((logits, own[:, None]), dim=1)
        pooled += logits.softmax(-1)[:, : len(keys)].square_().sum(0)
    return pooled / (question * heads)


def smoothed(scores: Tensor, rank_in_span: Tensor, reach: int = 1) -> Tensor:
    """The mean of each token's score and its neighbours', of its own span alone, [tokens].

    As SnapKV pools (arXiv 2404.14469, section 4.1): what stands beside an attended token is often
    read next. Beyond a span's ends scores are taken to be 0.

    Args:
        scores: [tokens].
        rank_in_span: [tokens], int64: 0 for the first token of each span.
        reach: how many neighbours count on either side.
    """
    total = scores.clone()
    for distance in range(1, min(reach, len(scores) - 1) + 1):
        joined = (rank_in_span[distance:] >= distance).to(scores)
        total[distance:] += scores[:-distance] * joined
        total[:-distance] += scores[distance:] * joined
    return total / (2 * reach + 1)
