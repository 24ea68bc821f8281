"""What a blend needs to know of a loaded model: its layers and how they rotate keys.

Nothing here is written per architecture. Attention layers are vLLM's `Attention` and `MLAAttention`
modules in the order of the decoder; the decoder layer around each is found by the numbered part of its
name (`model.layers.7.self_attn.attn` stands in `model.layers.7`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention

from semkv_rag.blend import Rotary, rotary_candidates
from semkv_rag.connector.obstacle import config_obstacle
from semkv_rag.connector.worker.model.latent import LatentLayer, latent_obstacle
from semkv_rag.connector.worker.model.layer import Layer

KINDS: dict[type[nn.Module], type[Layer]] = {Attention: Layer, MLAAttention: LatentLayer}
"""What a layer is, by vLLM's attention module."""


class Unservable(Exception):
    """The model or its configuration cannot be served with reuse; the message says why."""


def model_layers(model: nn.Module, config: VllmConfig) -> list[Layer]:
    """The decoder layers of a loaded model.

    Raises:
        Unservable: the model's attention is not of the plain causal kind, or its positions not of text's.
    """
    if reason := config_obstacle(config):
        raise Unservable(reason)
    if config.model_config.uses_mrope:
        _check_positions(model)
    positions = config.model_config.max_model_len
    modules = dict(model.named_modules())
    shared_rotary = next(
        (
            m
            for name, m in modules.items()
            if name.endswith("rotary_emb") and hasattr(m, "inv_freq")
        ),
        None,
    )
    attentions = {n: m for n, m in modules.items() if isinstance(m, tuple(KINDS))}
    if not attentions:  # vLLM's Transformers backend keeps them outside of the module tree
        attentions = {
            n: m
            for n, m in config.compilation_config.static_forward_context.items()
            if isinstance(m, tuple(KINDS))
        }
    seen: dict[int, list[Rotary]] = {}
    layers = []
    for name, attention in attentions.items():
        _check_attention(name, attention)
        parent = modules.get(name.rpartition(".")[0])
        rotary = getattr(parent, "rotary_emb", None) or shared_rotary
        if id(rotary) not in seen:  # one table for all layers that share a module
            seen[id(rotary)] = rotary_candidates(rotary, positions)
        kind = next(kind for module, kind in KINDS.items() if isinstance(attention, module))
        layers.append(kind(attention, _decoder_of(name, modules), [*seen[id(rotary)], None]))
    if not layers:
        raise Unservable("it has no attention layer that vLLM caches")
    if len({id(layer.decoder) for layer in layers}) != len(layers):
        raise Unservable("several attention layers share a decoder layer")
    return layers


def _check_positions(model: Any) -> None:
    """Make sure that a model with M-RoPE gives text the token's number in all three rows."""
    positions, _ = model.get_mrope_input_positions([0] * 8, [])
    if not torch.equal(positions.cpu(), torch.arange(8).expand(len(positions), -1)):
        raise Unservable("in text its tokens stand at other positions than their number")


def _check_attention(name: str, attention: Any) -> None:
    if chunk := getattr(attention, "attention_chunk_size", None):
        raise Unservable(
            f"{name} attends to chunks of {chunk} tokens: what a token sees changes with its position"
        )
    if isinstance(attention, MLAAttention):
        if reason := latent_obstacle(attention):
            raise Unservable(f"{name} {reason}")
        return
    if str(getattr(attention, "attn_type", "decoder")).rpartition(".")[2].lower() != "decoder":
        raise Unservable(f"{name} is not causal decoder attention")
    if attention.kv_sharing_target_layer_name is not None:
        raise Unservable(f"{name} shares another layer's KV cache")
    if getattr(attention, "kv_cache_update_bypass", False):  # vLLM 0.33
        raise Unservable(f"{name} is given no keys: the model writes its KV itself")
    if not hasattr(attention.impl, "do_kv_cache_update"):
        raise Unservable(
            f"the attention backend {attention.backend.name} writes the cache inside its kernel"
        )


def _decoder_of(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The innermost numbered module around an attention module."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = modules.get(".".join(parts[:end]))
        if parts[end - 1].isdigit() and module is not None:
            return module
    raise Unservable(f"{name} stands in no numbered decoder layer")
