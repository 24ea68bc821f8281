"""Numbers as whole ones of 8 or 4 bits, and two of 4 bits in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.store.codecs.codec import Scratch, divided, rounded_up


def around_middle(numbers: Tensor, dim: int, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and middle, bfloat16, of what stands along `dim`, and the numbers by them, -reach to reach.

    Halves of an odd number are kept halves: with a reach of 7.5 there is a code for 7.5 and none for 0.
    """
    low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    middle = (low / 2 + high / 2).bfloat16()
    apart = numbers - middle.float()
    scale = rounded_up(apart.abs().amax(dim, keepdim=True) / reach)
    half = reach % 1
    codes = (divided(apart, scale) + half).round_() - half
    return scale, middle, codes.clamp_(-reach, reach)


def signed(codes: Tensor) -> Tensor:
    """As int8."""
    return codes.round().clamp_(-127, 127).to(torch.int8)


def packed(codes: Tensor) -> Tensor:
    """Whole numbers from 0 to 15, [tokens, numbers], two in a byte."""
    low, high = codes.to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def unpacked(codes: Tensor, scratch: Scratch) -> Tensor:
    """The codes, float32."""
    tokens, half = codes.shape
    numbers = scratch.take("numbers", (tokens, 2 * half), torch.float32, codes.device)
    bits = scratch.take("bits", (tokens, half), torch.uint8, codes.device)
    numbers[:, :half].copy_(torch.bitwise_and(codes, 15, out=bits))
    numbers[:, half:].copy_(torch.bitwise_right_shift(codes, 4, out=bits))
    return numbers
