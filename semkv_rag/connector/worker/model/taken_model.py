"""The model that vLLM has loaded, and its paged cache, as blends and captures use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from semkv_rag.connector.worker.model.adapters import adapters_of
from semkv_rag.connector.worker.model.block_layout import BlockLayout, find_layouts
from semkv_rag.connector.worker.model.kv_tap import KVTap
from semkv_rag.connector.worker.model.latent import LatentLayer, attend_to_context
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.model_view import Unservable, model_layers
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.scattered import ScatteredAttention
from semkv_rag.connector.worker.model.sliced_model import SlicedModel
from semkv_rag.connector.worker.model.whole_windows import keeps_all
from semkv_rag.connector.worker.ranks import Ranks


def take_model(runner: Any, config: VllmConfig) -> tuple[SlicedModel, Sequence[BlockLayout]]:
    """The model of a runner whose cache is allocated, and the layout of each layer's blocks.

    Raises:
        Unservable: it cannot be served with reuse.
    """
    for group in runner.kv_cache_config.kv_cache_groups:
        _require_servable(group.kv_cache_spec, config.cache_config.block_size)
    layers = model_layers(runner.get_model(), config)
    ranks = _ranks(config, layers)
    tap, paged = KVTap(layers), PagedKV(runner, config.cache_config.block_size)
    layouts = find_layouts(layers, tap, paged, runner.dtype)
    by_token = any(layer.by_token for layer in layers)
    attention = ScatteredAttention(runner, config, paged, by_token=by_token)
    for layer in layers:
        if isinstance(layer, LatentLayer):
            attend_to_context(layer)
    adapters = adapters_of(runner, config)
    model = SlicedModel(runner.get_model(), layers, tap, paged, attention, config, ranks, adapters)
    return model, layouts


def _require_servable(spec: KVCacheSpec, block_size: int) -> None:
    """Make sure that a group of layers can be served.

    Raises:
        Unservable: it cannot be served with reuse.
    """
    if not (keeps_all(spec) or type(spec) is SlidingWindowSpec):
        raise Unservable(f"layers of its cache have a {type(spec).__name__}")
    if spec.block_size != block_size:
        raise Unservable(
            "groups of its layers have blocks of different sizes: turn vLLM's hybrid KV cache manager off"
        )


def _ranks(config: VllmConfig, layers: Sequence[Layer]) -> Ranks:
    """This rank among those that compute the model.

    Args:
        layers: those of the model that it has.

    Raises:
        Unservable: the layers of a stage are not those that vLLM counts.
    """
    stages = config.parallel_config.pipeline_parallel_size
    total = config.model_config.get_total_num_hidden_layers() if stages > 1 else len(layers)
    ranks = Ranks.of_this_process(total)
    if len(layers) != ranks.own_layers:
        raise Unservable(
            f"{len(layers)} of the {ranks.own_layers} layers of a stage have attention that vLLM caches"
        )
    return ranks
