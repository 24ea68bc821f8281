"""Rows without an adapter, beside rows with one, in vLLM's forwards on a CPU.

vLLM marks rows without an adapter by the index -1. Its kernels for a CPU take that for the last adapter
there is. So a request without an adapter that shares a forward with others gets the answer, and the KV,
of another model. The kernels compute a product, so the fix is to give them rows of zeros, which add
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

KERNELS = ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")
"""All others are made of these."""


def leave_bare_rows() -> None:
    """Have vLLM's kernels for a CPU leave rows without an adapter as they are; in this process."""
    for name in KERNELS:
        kernel = getattr(lora_ops, name)
        if not hasattr(kernel, "__wrapped__"):
            for module in (lora_ops, punica_cpu):
                setattr(module, name, _leaving(kernel))


def _leaving(kernel: Callable[..., None]) -> Callable[..., None]:
    @wraps(kernel)
    def leaving(
        inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, *rest: Any, **more: Any
    ) -> None:
        kernel(inputs * (indices >= 0)[:, None], weights, output, indices, *rest, **more)

    return leaving
