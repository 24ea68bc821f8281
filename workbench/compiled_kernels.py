"""Our Triton kernels compiled for a GPU that need not be there.

    python -m workbench.compiled_kernels 90      # an H100; 80 is an A100, 89 an L40S, 100 a B200

What runs in Triton's interpreter may not compile. Each kernel is compiled as the functions that launch it
would have it, and its shared memory compared with what the GPU has: a kernel that wants more is not
launched, and the gate takes the backend's attention or decodes in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from semkv_rag.connector.worker.model import load_kernel, row_kernel
from semkv_rag.connector.worker.model.row_tiles import Rows, tile_rows
from semkv_rag.connector.worker.model.strides import Strides
from semkv_rag.store.codecs import EncodedLayer, codec_named, codec_names

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""

KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}

MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {"heads": 9, "kv_heads": 3, "dim": 64},
    "Llama 3.1 8B": {"heads": 32, "kv_heads": 8, "dim": 128},
    "Qwen2.5 0.5B": {"heads": 14, "kv_heads": 2, "dim": 64},
    "Gemma 2 9B": {"heads": 16, "kv_heads": 8, "dim": 256, "softcap": 50.0, "window": 4096},
    "Gemma 3 27B": {"heads": 32, "kv_heads": 16, "dim": 128, "window": 1024},
    "gpt-oss 20B": {"heads": 64, "kv_heads": 8, "dim": 64, "window": 128, "sinks": True},
}
BLOCK_TOKENS = 16


class _Launched:
    """Takes a kernel's place, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def compiled(
    kernel: Any, launch: tuple[tuple[Any, ...], Mapping[str, Any]], capability: int
) -> int:
    """Compile one launch; the shared memory that it wants, bytes."""
    args, constants = launch
    signature = dict.fromkeys(constants, "constexpr")
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, Tensor):
            signature[name] = "*" + KINDS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    ordered = {name: signature[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=values)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return int(made.metadata.shared)


def of_rows(model: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Attention over some rows of a model."""
    heads, kv_heads, dim = (model[name] for name in ("heads", "kv_heads", "dim"))
    most = tile_rows(heads // kv_heads)
    query = torch.zeros(most, heads, dim, dtype=dtype)
    size = BLOCK_TOKENS * kv_heads * dim
    keys = Strides(0, 2 * size, kv_heads * dim, dim, 1)
    rows = Rows(
        torch.arange(most),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.tensor([(0, most, 0)], dtype=torch.int32),
    )
    row_kernel.attend(
        torch.zeros_like(query),
        query,
        torch.zeros(4, 2 * size, dtype=dtype),
        rows,
        keys=keys,
        values=Strides(size, 2 * size, kv_heads * dim, dim, 1),
        kv_heads=kv_heads,
        value_dim=dim,
        block_size=BLOCK_TOKENS,
        scale=dim**-0.5,
        softcap=model.get("softcap", 0.0),
        window=model.get("window"),
        sinks=torch.zeros(heads, dtype=dtype) if model.get("sinks") else None,
    )


def of_loading(model: Mapping[str, Any], dtype: torch.dtype, codec: str) -> None:
    """Stored K, moved, and V of a model."""
    kv_heads, dim = model["kv_heads"], model["dim"]
    chosen, stored = codec_named(codec), torch.zeros(40, kv_heads, dim, dtype=dtype)
    both = EncodedLayer(chosen, chosen.encode(stored, stored), dtype).coded(slice(None))
    assert both is not None
    for numbers, matrices in zip(both, (torch.eye(dim, dtype=dtype)[None], None), strict=True):
        load_kernel.load(
            torch.zeros(4, BLOCK_TOKENS * kv_heads * dim, dtype=dtype),
            [numbers],
            torch.arange(40),
            Strides(0, BLOCK_TOKENS * kv_heads * dim, kv_heads * dim, dim, 1),
            block_size=BLOCK_TOKENS,
            join=lambda parts: torch.cat([*parts]),
            matrices=matrices,
        )


def main() -> None:
    capability = int(sys.argv[1])
    rows, loading = _Launched(row_kernel._kernel), _Launched(load_kernel._kernel)
    row_kernel._kernel, load_kernel._kernel = rows, loading
    too_much = 0
    for name, model in MODELS.items():
        rows.launches.clear()
        loading.launches.clear()
        of_rows(model, torch.bfloat16)
        for codec in codec_names():
            of_loading(model, torch.bfloat16, codec)
        for kernel, what in ((rows, "attention of rows"), (loading, "loading")):
            shared = max(compiled(kernel.kernel, one, capability) for one in kernel.launches)
            fits = shared <= SHARED_KB[capability] << 10
            too_much += not fits
            verdict = "" if fits else f", {capability} has {SHARED_KB[capability]} KB"
            print(f"{name}, {what}: {shared / 1024:.0f} KB{verdict}", flush=True)
    sys.exit(too_much)


if __name__ == "__main__":
    main()
