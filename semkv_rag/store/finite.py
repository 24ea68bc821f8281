"""Whether a tensor is all numbers: NaN or infinity in one stored value would spread over an answer.

Asked for every tensor that is read or written, so on the path to the first token. `torch.isfinite`
takes more than ten times as long as reading the tensor does, and is not there for all dtypes.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

_BITS: Final = {
    torch.float32: ("<i4", "<u4", 0x7F800000, 0xFF800000),
    torch.float16: ("<i2", "<u2", 0x7C00, 0xFC00),
    torch.bfloat16: ("<i2", "<u2", 0x7F80, 0xFF80),
    torch.float8_e4m3fn: ("<i1", "<u1", 0x7F, 0xFF),
    torch.float8_e5m2: ("<i1", "<u1", 0x7C, 0xFC),
}
"""Integers of a number's width, and the least bits that are no number, without and with the sign."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, not copied."""
    if not tensor.nbytes:
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().data.cast("B")


def is_finite(tensor: Tensor, content: memoryview) -> bool:
    """Whether a tensor holds neither NaN nor infinity; integers never do.

    Of the bits without the sign, those of numbers are the smaller ones. So the greatest of the bits as
    signed integers tells of what has the sign 0, and as unsigned ones of what has the sign 1.

    Args:
        tensor: contiguous and on the CPU.
        content: its memory, see `raw_bytes`.
    """
    bits = _BITS.get(tensor.dtype)
    if bits is None or not content:
        return True
    if tensor.dtype is torch.float32 and math.isfinite(tensor.sum().item()):
        return True  # once through instead of twice; a sum of numbers may be infinite, too
    signed, unsigned, positive, negative = bits
    greatest = np.maximum.reduce
    return bool(
        greatest(np.frombuffer(content, signed)) < positive
        and greatest(np.frombuffer(content, unsigned)) < negative
    )
