"""The kernel that loads stored KV against decoding, moving and vLLM's write, on the model's own cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.model.kernel_loading import KernelLoading
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.store.codecs import EncodedLayer, codec_named, codec_names

logger = logging.getLogger(__name__)

TOKENS = 200
"""Tokens of the chunk that is made up: several groups of the codecs' scales."""

LEFT_OUT = 9
"""Tokens at its beginning that a span leaves out."""

SHIFT = 23

ROUNDINGS, LEAST = 8, 0.005
"""What may be between both, since each rounds on its own way: so many of the dtype's, or where a GPU
multiplies float32 in fewer bits so much. A wrong rotation or scale is far above."""


def checked_loading(setting: BlendSetting, blocks: int, dtype: torch.dtype) -> KernelLoading | None:
    """The kernel, where it runs and writes what is written without it; else None.

    Writes over the first blocks of the paged cache. The layers' rotations are known.

    Args:
        blocks: of the cache.
        dtype: the model's.
    """
    model = setting.model
    try:
        kernel = KernelLoading(model.layers, setting.layouts, model.paged)
    except NotImplementedError as reason:
        logger.debug("semkv: stored KV is decoded, moved and written one by one: %s", reason)
        return None
    try:
        fault = loading_fault(setting, kernel, blocks, dtype)
    except Exception:
        logger.exception("semkv: the kernel that loads stored KV failed, and is not used")
        return None
    if fault is not None:
        logger.warning("semkv: the kernel that loads stored KV is not used: %s", fault)
        return None
    return kernel


@torch.inference_mode()
def loading_fault(
    setting: BlendSetting, kernel: KernelLoading, blocks: int, dtype: torch.dtype
) -> str | None:
    """What is wrong with what the kernel writes, for each kind of layer and each codec, or None."""
    model, paged = setting.model, setting.model.paged
    held = min(-(-TOKENS // paged.block_size), (blocks - 1) // paged.groups)
    count = min(TOKENS, held * paged.block_size)
    ids = paged.first_blocks(held)
    positions = torch.arange(count - LEFT_OUT, device=paged.device)
    slots_of_groups = paged.slots(ids, positions)
    # Two spans: the first one is moved, the other stays.
    rows = [slice(LEFT_OUT, count // 2), slice(count // 2, count)]
    moved = rows[0].stop - rows[0].start
    generator = torch.Generator().manual_seed(0)

    def bring(part: Tensor) -> Tensor:
        return part.to(paged.device)

    def join(parts: Sequence[Tensor]) -> Tensor:
        return bring(torch.cat([*parts]))

    kinds = {(layer.kv_shapes, id(layer.rotary)): at for at, layer in enumerate(model.layers)}
    for index in kinds.values():
        layer, read = model.layers[index], ReadBack(paged, setting.layouts, ids, positions)
        slots = slots_of_groups[paged.group_of(layer.attention)]
        matrices = None
        if layer.rotary is not None:
            size = layer.kv_shapes[0][1]
            turn = layer.rotary.matrix(SHIFT, size).cpu()
            matrices = torch.stack((turn, torch.eye(size))).to(paged.device, dtype)
        for name in codec_names():
            encoded = _made_up(name, layer.kv_shapes, count, dtype, generator)
            if encoded is None:
                continue
            keys, values = encoded.decode(slice(LEFT_OUT, count), bring=bring)
            if matrices is not None:
                keys = torch.cat((keys[:moved] @ matrices[0], keys[moved:]))
            model.tap.write(index, keys, values, slots)
            right = read.both(index)
            # What the kernel does not write must not be right by having been there before.
            model.tap.write(index, torch.zeros_like(keys), torch.zeros_like(values), slots)
            both = [encoded, encoded]
            if not kernel.write(index, both, rows, slots, matrices=matrices, join=join):
                continue
            error = max(map(_error, read.both(index), right))
            if not error <= max(ROUNDINGS * torch.finfo(dtype).eps, LEAST):
                return f"{name} in layer {index} is {error:.2g} off"
    return None


def _made_up(
    codec: str,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    tokens: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> EncodedLayer | None:
    """Random KV of a layer, stored; None where the codec does not take such."""
    chosen = codec_named(codec)
    try:
        chosen.layout(tokens, *shapes, dtype)
    except ValueError:
        return None
    keys, values = (torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes)
    return EncodedLayer(chosen, chosen.encode(keys, values), dtype)


def _error(written: Tensor, right: Tensor) -> float:
    """The largest of a token and head, relative."""
    apart = (written.float() - right.float()).norm(dim=-1)
    return float((apart / right.float().norm(dim=-1).clamp_min(1e-3)).max())
