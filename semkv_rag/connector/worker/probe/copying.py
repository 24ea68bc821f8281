"""Copy rates: to the device and back, into the paged cache as blends do, and out as captures do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from semkv_rag.connector.worker.blend.setting import BlendSetting

REPEATS = 5


@torch.inference_mode()
def probe_copying(setting: BlendSetting, held: int, dtype: torch.dtype) -> dict[str, Any]:
    """The best of some copies of one layer's KV of `held` blocks, in bytes of K and V a second."""
    model, paged = setting.model, setting.model.paged
    layout, layer = setting.layouts[0], model.layers[0]
    blocks = torch.arange(1, held + 1, device=paged.device)
    slots = paged.slots(blocks, torch.arange(held * paged.block_size, device=paged.device))
    cache = layer.attention.kv_cache
    on_host = [torch.randn(len(slots), *shape).to(dtype) for shape in layer.kv_shapes]
    keys, values = (one.to(paged.device) for one in on_host)
    size_bytes = sum(one.nbytes for one in on_host)

    def rate(copy: Callable[[], object]) -> float:
        return size_bytes / min(_seconds(copy, paged.device) for _ in range(REPEATS))

    def unpacked() -> tuple[Tensor, Tensor]:
        copies = paged.copy_blocks([cache], blocks).cpu()
        return layout.unpack(paged.codes(cache, copies))

    rates = {
        "bytes": size_bytes,
        "into_cache_bytes_per_s": rate(lambda: model.tap.write(0, keys, values, slots)),
        "out_of_cache_bytes_per_s": rate(unpacked),
    }
    if paged.device.type != "cpu":
        pinned = [one.pin_memory() for one in on_host]
        rates["to_device_bytes_per_s"] = rate(lambda: [one.to(paged.device) for one in on_host])
        rates["pinned_to_device_bytes_per_s"] = rate(
            lambda: [one.to(paged.device, non_blocking=True) for one in pinned]
        )
        rates["from_device_bytes_per_s"] = rate(lambda: (keys.cpu(), values.cpu()))
    return rates


def _seconds(copy: Callable[[], object], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    copy()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin
