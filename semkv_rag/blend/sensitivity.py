"""How much a stored token depends on what stands before it, measured once and kept with the chunk.

A chunk's V are computed behind two contexts. Where they hardly differ, what stands before in a prompt
hardly matters; where they differ, the stored V are likely to be stale there. That is known before any
question is asked, and costs a byte a token and layer. Times the attention that a question gives a token
in that layer it says how much of the answer rests on stale KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 8
"""Codes for a factor of two: a value is right within 4.5 %."""
_MIDDLE = 128
"""The code of 1.0."""


def sensitivity_of(values: Tensor, others: Tensor) -> Tensor:
    """How far the V of one layer are from those behind another context, [tokens], float32.

    The L2 norm over all heads. V only: keys carry a position, and V are what an answer is made of.

    Args:
        values, others: [tokens, kv_heads, head_dim].
    """
    return (values.float() - others.float()).square().flatten(1).sum(1).sqrt()


def encoded(values: Tensor) -> Tensor:
    """Sensitivities as bytes, uint8: the logarithm in steps of an eighth of a factor of two; 0 is 0.

    What is above 2^15.9 or below 2^-15.9 is told as these.
    """
    codes = (values.float().log2() * _STEPS + _MIDDLE).round().clamp(1, 255)
    return torch.where(values > 0, codes, 0).to(torch.uint8)


def decoded(codes: Tensor) -> Tensor:
    """What `encoded` was given, float32."""
    return torch.where(codes > 0, torch.exp2((codes.float() - _MIDDLE) / _STEPS), 0.0)
