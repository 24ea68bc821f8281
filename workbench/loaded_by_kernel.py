"""The kernel that loads stored KV in an engine on a CPU, and torch in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from semkv_rag.connector.worker.model.strides import Strides
from semkv_rag.store.codecs.coded import Coded, Join
from workbench.decoded import decoded_in_torch

KERNEL = "semkv_rag.connector.worker.model.load_kernel"


def load_in_torch(
    cache: Tensor,
    numbers: Sequence[Coded],
    slots: Tensor,
    where: Strides,
    *,
    block_size: int,
    join: Join,
    matrices: Tensor | None = None,
) -> None:
    heads, dim = numbers[0].shape
    parts = [decoded_in_torch(one, cache.dtype) for one in numbers]
    if matrices is not None:
        parts = [part @ matrix for part, matrix in zip(parts, matrices, strict=True)]
    places = where.first + slots // block_size * where.block + slots % block_size * where.token
    places = places[:, None, None] + (torch.arange(heads) * where.head)[:, None]
    reach = int(torch.tensor(cache.shape).sub(1).mul(torch.tensor(cache.stride())).sum()) + 1
    cache.as_strided((reach,), (1,))[places + torch.arange(dim) * where.dim] = join(parts)


def unmoved(*args: Any, matrices: Tensor | None = None, **kwargs: Any) -> None:
    load_in_torch(*args, **kwargs)


def moved_alike(*args: Any, matrices: Tensor | None = None, **kwargs: Any) -> None:
    """All spans as the first one."""
    if matrices is not None:
        matrices = matrices[:1].expand_as(matrices)
    load_in_torch(*args, matrices=matrices, **kwargs)


def install(worker: Any, load: Callable[..., None] | None) -> bool:
    """Have blends load by the kernel, if it passes; whether it does. `load`: torch in its place."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from semkv_rag.connector.worker import load_check
    from semkv_rag.connector.worker.model import kernel_loading

    kernel_loading.require_triton = lambda *_: None
    if load is not None:
        sys.modules[KERNEL] = SimpleNamespace(load=load)  # type: ignore[assignment]
    setting = get_kv_transfer_group().executor._blend_pass.setting
    runner = worker.model_runner
    blocks = runner.kv_cache_config.num_blocks
    setting.model.loading = load_check.checked_loading(setting, blocks, runner.dtype)
    return setting.model.loading is not None


def remove(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().executor._blend_pass.setting.model.loading = None
    sys.modules.pop(KERNEL, None)


def count(worker: Any) -> int:
    """Layers that the kernel has written since it was asked last."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    loading = get_kv_transfer_group().executor._blend_pass.setting.model.loading
    seen = getattr(loading, "seen", 0)
    if not hasattr(loading, "seen"):
        write = loading.write

        def counted(*args: Any, **kwargs: Any) -> bool:
            loading.seen += write(*args, **kwargs)
            return True

        loading.write = counted
    loading.seen = 0
    return int(seen)
