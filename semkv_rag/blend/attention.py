"""What a question attends to: softmax over given keys, pooled over its tokens and heads."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Pooling: TypeAlias = Literal["mean", "max"]
"""Over question tokens and heads: all count alike, or the one that attends most."""


def question_attention(
    queries: Tensor,
    keys: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    pooling: Pooling = "mean",
) -> Tensor:
    """The attention that each key gets from the question in one layer, [keys], float32.

    Args:
        queries: [question, heads, head_dim], rotated as the keys are. Neighbouring heads share one
            of the keys' heads.
        keys: [keys, kv_heads, head_dim].
        visible: [question, keys], bool: what each question token may attend to; at least one key.
        scale: of the logits.
        softcap: logits are bounded to it by tanh; 0 for none.
    """
    question, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries.float() * scale).view(question, kv_heads, heads // kv_heads, head_dim)
    hidden = ~visible[:, None]
    pooled = torch.zeros(len(keys), device=keys.device)
    # One at a time: [question, group, keys] is the largest tensor here.
    for head in range(kv_heads):
        logits = grouped[:, head] @ keys[:, head].float().T
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1).flatten(0, 1)
        if pooling == "mean":
            pooled += weights.sum(0)
        else:
            pooled = torch.maximum(pooled, weights.amax(0))
    return pooled / (question * heads) if pooling == "mean" else pooled
