"""Layers with a sliding window whose whole KV stays in the cache, without vLLM's hybrid KV cache manager.

Their blocks are then kept as those of full attention are, and all layers share one block table. The
layers compute as before: their kernels know the window from the model. With the hybrid manager vLLM gives
up blocks outside of the window; see `scheduler.request_blocks` for what blends and captures do there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def whole_windows(specs: Mapping[str, KVCacheSpec], block_size: int) -> dict[str, KVCacheSpec]:
    """The layers' cache specifications, with full attention's in the place of a window's.

    vLLM does the same by itself where a model has both kinds of layers, though not where all layers have
    a window, nor where their windows differ.

    Args:
        block_size: of the full layers, in tokens.
    """
    return {
        name: _whole(spec, block_size)
        if type(spec) is SlidingWindowSpec and spec.page_size_padded is None
        else spec
        for name, spec in specs.items()
    }


def leave_sinks_whole(config: VllmConfig) -> None:
    """Keep vLLM's CPU kernel from sharing out a token's KV among threads, where layers have sinks.

    It plans the shares for all layers of a group, by no window where their windows differ. A share that
    is outside of a layer's window then has no output, and counts by its sink all the same: decoded tokens
    come out of memory that nobody has written (vLLM 0.32, and so without us if its hybrid KV cache
    manager is off).
    Must run before vLLM reads its variables for good, which is right behind the loading of the model.
    """
    layers = config.compilation_config.static_forward_context.values()
    sinks = any(getattr(getattr(one, "impl", None), "sinks", None) is not None for one in layers)
    if sinks and current_platform.is_cpu():
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def keeps_all(spec: KVCacheSpec) -> bool:
    """Whether a group's cache holds the KV of all tokens of a request until it ends."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(keeps_all(one) for one in spec.kv_cache_specs.values())
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec)  # vLLM has others made from these


def _whole(spec: SlidingWindowSpec, block_size: int) -> FullAttentionSpec:
    shared = {field.name for field in fields(FullAttentionSpec) if field.init}
    kept = {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if field.init and field.name in shared - {"sliding_window"}
    }
    return FullAttentionSpec(**{**kept, "block_size": block_size})
