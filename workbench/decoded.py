"""What a kernel is told of stored K or V, decoded in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.store.codecs.coded import Coded


def decoded_in_torch(numbers: Coded, dtype: torch.dtype) -> Tensor:
    """What `Coded` says, [tokens, heads, dim]."""
    heads, dim = numbers.shape
    decoded = numbers.codes
    if numbers.scale is not None:
        codes = decoded.float()
        if decoded.dtype == torch.uint8:
            codes = torch.cat((decoded & 15, decoded >> 4), 1).float() - 7.5
        codes = codes.view(-1, heads, dim)
        group = (torch.arange(len(codes)) + numbers.begin) // numbers.group_tokens
        each = dim // numbers.scale.shape[2]
        codes = codes * numbers.scale[group].float().repeat_interleave(each, 2)
        if numbers.middle is not None:
            codes = codes + numbers.middle[group].float().repeat_interleave(each, 2)
        decoded = codes.to(dtype)
    return decoded
