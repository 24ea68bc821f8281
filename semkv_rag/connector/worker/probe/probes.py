"""The probes by name, as the worker class is asked for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.probe.attention import probe_attention
from semkv_rag.connector.worker.probe.copying import probe_copying
from semkv_rag.connector.worker.probe.layout import probe_layout

Found: TypeAlias = dict[str, Any]
"""Figures by name; `left_out` says why there are none, `wrong` what does not work."""


@dataclass(frozen=True)
class Bench:
    """What probes work on.

    Attributes:
        runner: vLLM's model runner.
        limit: the most tokens of a request.
    """

    setting: BlendSetting
    runner: Any
    limit: int


def _about(bench: Bench, size: int) -> Found:
    """The device, the model and its paged cache."""
    model = bench.setting.model
    layer = model.layers[0]
    device = model.paged.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else str(device),
        "dtype": str(bench.runner.dtype).removeprefix("torch."),
        "attention_backend": layer.backend,
        "attention_of_blends": type(model.attention).__name__,
        "loading_of_blends": type(model.loading).__name__ if model.loading else None,
        "kv_cache_dtype": layer.attention.kv_cache_dtype,
        "block_size": model.paged.block_size,
        "blocks": bench.runner.kv_cache_config.num_blocks,
        "layers": len(model.layers),
        "model_runner": 2 if hasattr(bench.runner, "req_states") else 1,
        "torch_threads": torch.get_num_threads(),
    }


def _layout(bench: Bench, size: int) -> Found:
    return probe_layout(bench.setting, blocks=bench.runner.kv_cache_config.num_blocks, held=size)


def _attention(bench: Bench, size: int) -> Found:
    limit = bench.runner.kv_cache_config.num_blocks - 1
    limit = min(bench.limit, limit * bench.setting.model.paged.block_size)
    return probe_attention(bench.setting, runs=size, limit=limit, dtype=bench.runner.dtype)


def _copying(bench: Bench, size: int) -> Found:
    blocks = bench.runner.kv_cache_config.num_blocks - 1
    return probe_copying(bench.setting, min(size, blocks), bench.runner.dtype)


PROBES: dict[str, Callable[[Bench, int], Found]] = {
    "about": _about,
    "layout": _layout,
    "attention": _attention,
    "copying": _copying,
}
"""Each is given what it works on and a size: blocks for `layout` and `copying`, runs for `attention`."""
