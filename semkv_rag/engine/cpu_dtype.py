"""Which numbers a CPU computes with fast: bfloat16 needs instructions of its own on x86."""

from __future__ import annotations

import platform
from typing import Literal

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform


def fast_dtype() -> Literal["auto", "float32"]:
    """The `dtype` that an engine computes fast with on this machine: the model's own, or float32."""
    return "float32" if current_platform.is_cpu() and not _halves_are_fast() else "auto"


def slow_dtype(config: VllmConfig) -> str | None:
    """Why a model is slower on this CPU than it need be, and what to do; or None."""
    dtype = config.model_config.dtype
    if fast_dtype() == "auto" or dtype == torch.float32:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"this CPU has neither AVX512_BF16 nor AMX and computes {name} two to several times slower than "
        "float32: start and precompute with dtype=float32 (twice the memory and disk), or use a CPU that "
        "has one of them"
    )


def _halves_are_fast() -> bool:
    """Whether numbers of 16 bits are multiplied as fast as float32."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
