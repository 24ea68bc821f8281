"""Layout: what is written to scattered blocks is read back as it was, and no other block changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.model.read_back import ReadBack


@torch.inference_mode()
def probe_layout(setting: BlendSetting, *, blocks: int, held: int) -> dict[str, Any]:
    """Write random K and V to some blocks of each layer, every other one of the first ones.

    Args:
        blocks: of the paged cache.
        held: how many are written.

    Returns:
        `largest_error`, relative; `rounding`, which it may be; `blocks_changed`: those that were not to
        change; `layers`; `blocks`.
    """
    model, paged = setting.model, setting.model.paged
    held = min(held, (blocks - 1) // 2)
    if held < 1:
        return {"left_out": f"the KV cache has {blocks} blocks, 3 are needed"}
    generator = torch.Generator().manual_seed(held)
    written = 1 + 2 * torch.randperm(held, generator=generator)
    others = torch.arange(2, 2 * held + 1, 2)
    written, others = written.to(paged.device), others.to(paged.device)
    positions = torch.arange(held * paged.block_size, device=paged.device)
    slots = paged.slots(written, positions)
    largest, changed = 0.0, 0
    for index, layer in enumerate(model.layers):
        cache = layer.attention.kv_cache
        before = paged.codes(cache, paged.copy_blocks([cache], others)).clone()
        dtype = setting.layouts[index].dtype
        keys, values = (
            torch.randn(len(positions), *shape, generator=generator).to(paged.device, dtype)
            for shape in layer.kv_shapes
        )
        model.tap.write(index, keys, values, slots)
        of_groups = written.expand(paged.groups, -1)
        read = ReadBack(paged, setting.layouts, of_groups, positions).both(index)
        largest = max(largest, *map(_largest_error, read, (keys, values)))
        after = paged.codes(cache, paged.copy_blocks([cache], others))
        changed += int((after != before).any(dim=1).sum())
    return {
        "layers": len(model.layers),
        "blocks": held,
        "largest_error": largest,
        "rounding": max(layout.rounding for layout in setting.layouts),
        "blocks_changed": changed,
    }


def _largest_error(read: Tensor, written: Tensor) -> float:
    error = (read.float() - written.float()).abs() / written.float().abs().clamp_min(0.1)
    return float(error.max())
