"""Stored KV: a chunk's keys and values as its context made them, and its keys moved elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tests.reference.plain import PlainModel, causal

LayerKV = tuple[Tensor, Tensor]
"""One layer's K (rotated) and V, each [tokens, kv_heads, head_dim]. Of multi-head latent attention K is
the part that turns, and V the latent, both of one head."""


@dataclass(frozen=True, eq=False)
class StoredKV(Sequence[LayerKV]):
    """A chunk's KV, layer by layer: `for keys, values in stored`.

    Attributes:
        context: the tokens that stood to the chunk's left, from position 0.
        tokens: the chunk's tokens; the first stood at position `len(context)`.
        layers: per layer, the chunk tokens' K and V.
        layer_inputs: per layer, what went into it for context and chunk, [1, tokens, hidden]. Keys
            at other positions are computed from it.
        sensitivity: how far V are from those behind another context, [layers, tokens], or None.
    """

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    layers: tuple[LayerKV, ...]
    layer_inputs: tuple[Tensor, ...]
    sensitivity: Tensor | None = None

    def __getitem__(self, layer: Any) -> Any:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)


class StoringModel(PlainModel):
    """A model whose KV of chunks can be taken and moved."""

    def compared(
        self, context: Sequence[int], tokens: Sequence[int], reference: Sequence[int]
    ) -> StoredKV:
        """The KV of `tokens` behind `context`, and how far V are from those behind `reference`.

        As a file holds it: a factor of two is eight steps.
        """
        stored, other = self.stored(context, tokens), self.stored(reference, tokens)
        pairs = zip(stored.layers, other.layers, strict=True)
        far = torch.stack([(a - b).norm(dim=(1, 2)) for (_, a), (_, b) in pairs])
        steps = torch.round(8 * torch.log2(far))
        return replace(stored, sensitivity=torch.where(far > 0, 2.0 ** (steps / 8), 0.0))

    def stored(self, context: Sequence[int], tokens: Sequence[int]) -> StoredKV:
        """The KV of `tokens` as computed behind `context`."""
        sequence = [*context, *tokens]
        positions = torch.arange(len(sequence))
        inputs: list[Tensor] = []

        def record(_layer: nn.Module, args: tuple[Any, ...]) -> None:
            inputs.append(args[0])

        cache = self._run_hooked([record] * len(self.decoder_layers), sequence, positions)
        return StoredKV(
            context=tuple(context),
            tokens=tuple(tokens),
            layers=self._layers(cache, len(context)),
            layer_inputs=tuple(inputs),
        )

    def moved(self, stored: StoredKV, position: int) -> tuple[LayerKV, ...]:
        """The chunk's KV with its first token at `position`.

        No key is rotated here. The model runs again with the chunk at its new position, and every
        layer is given what went into it the first time, so that nothing but the position of its
        keys differs. `position` may be below 0: such tokens stand before the prompt, where they are
        cut off, and get no right keys.
        """
        sequence = [*stored.context, *stored.tokens]
        positions = torch.arange(len(sequence)) - len(stored.context) + position

        def give(hidden: Tensor) -> Any:
            return lambda _layer, args: (hidden, *args[1:])

        hooks = [give(hidden) for hidden in stored.layer_inputs]
        cache = self._run_hooked(hooks, sequence, positions.clamp(min=0))
        return self._layers(cache, len(stored.context))

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The model's decoder layers, in order."""
        decoder = self.hf.get_decoder()
        return decoder.h if hasattr(decoder, "h") else decoder.layers

    def _run_hooked(self, hooks: list[Any], tokens: list[int], positions: Tensor) -> DynamicCache:
        """The cache after `tokens`, run with one pre-hook on each decoder layer."""
        handles = [
            layer.register_forward_pre_hook(hook)
            for layer, hook in zip(self.decoder_layers, hooks, strict=True)
        ]
        order = torch.arange(len(tokens))
        cache = DynamicCache()
        try:
            self.forward(tokens, positions, causal(order, order), cache)
        finally:
            for handle in handles:
                handle.remove()
        return cache

    def _layers(self, cache: DynamicCache, first: int) -> tuple[LayerKV, ...]:
        """The cache's K and V from token `first` on, turned from [1, kv_heads, tokens, head_dim]."""
        return tuple(
            self.turned(layer.keys[0, :, first:], layer.values[0, :, first:])
            for layer in cache.layers
        )

    def turned(self, one: Tensor, other: Tensor) -> LayerKV:
        """A layer's K and V out of what transformers caches, or the other way round.

        It caches the latent of latent attention as K and the part that turns as V.

        Args:
            one, other: [kv_heads, tokens, head_dim], or [tokens, kv_heads, head_dim].
        """
        one, other = one.transpose(0, 1), other.transpose(0, 1)
        return (other, one) if hasattr(self.hf.config, "kv_lora_rank") else (one, other)
