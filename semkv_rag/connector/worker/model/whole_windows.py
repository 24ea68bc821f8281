"""Layers with a sliding window whose whole KV stays in the cache.

vLLM gives up the blocks of such a layer once they are outside of the window. What reuse takes from them,
a chunk that is captured, a prefix that is found, a token's KV that a blend leaves as it is, may stand
anywhere in a prompt. So their blocks are kept as those of full attention are, and all layers share one
block table. The layers compute as before: their kernels know the window from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def whole_windows(specs: Mapping[str, KVCacheSpec], block_size: int) -> dict[str, KVCacheSpec]:
    """The layers' cache specifications, with full attention's in the place of a window's.

    vLLM does the same by itself for connectors like ours where a model has both kinds of layers, though
    not where all layers have a window, nor where their windows differ.

    Args:
        block_size: of the full layers, in tokens.
    """
    return {
        name: _whole(spec, block_size)
        if type(spec) is SlidingWindowSpec and spec.page_size_padded is None
        else spec
        for name, spec in specs.items()
    }


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
