"""The model called on tokens of our choice, before vLLM's own forward and beside its compiled graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from semkv_rag.connector.worker.model.kv_tap import KVTap
from semkv_rag.connector.worker.model.model_view import Layer
from semkv_rag.connector.worker.model.paged import PagedKV


class KVKnown(Exception):
    """Stops a forward once a layer's K and V are known."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class EagerModel:
    """A loaded model with its paged cache.

    Args:
        model: the model, as the runner calls it.
        layers: its decoder layers.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tap: KVTap,
        paged: PagedKV,
        config: VllmConfig,
    ) -> None:
        self._model, self._config = model, config
        self.layers, self.tap, self.paged = layers, tap, paged

    def forward(
        self,
        tokens: Sequence[int],
        blocks: Tensor,
        positions: Tensor,
        *,
        rotary_shift: int = 0,
    ) -> Tensor:
        """The hidden states of tokens at `positions` of a request, whose KV is written.

        Args:
            blocks: [blocks], int64: the request's blocks, in order.
            positions: [tokens], int64, ascending.
            rotary_shift: what the model is told to add to the positions; the cache and the mask
                stay where they are. The gate sees by it how keys move.
        """
        ids = torch.tensor(tokens, device=self.paged.device)
        metadata, slots = self.paged.metadata(blocks, positions)
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=len(ids),
            slot_mapping=slots,
            skip_compiled=True,
        ):
            hidden: Tensor = self._model(input_ids=ids, positions=positions + rotary_shift)
        return hidden

    def fill(
        self,
        tokens: Sequence[int],
        blocks: Tensor,
        positions: Tensor,
        see: Callable[[int, Tensor, Tensor], None] | None = None,
        until: int | None = None,
    ) -> None:
        """As `forward`, but stopped in a layer once its KV is written: nobody reads more.

        Args:
            see: called with each layer's index and its fresh K and V, [tokens, kv_heads, head_dim].
            until: that layer; the last one when left out.
        """
        end = len(self.layers) - 1 if until is None else until

        def handler(index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            last = index == end
            if see is None and not last:
                return
            keys, values = self.as_heads(index, keys, values)
            if see is not None:
                see(index, keys, values)
            if last:
                self.tap.write(index, keys, values, slots)
                raise KVKnown(keys, values)

        with self.tap.handling(handler), contextlib.suppress(KVKnown):
            self.forward(tokens, blocks, positions)

    @contextlib.contextmanager
    def reaching(self, reached: Callable[[int], None]) -> Iterator[None]:
        """Have `reached` called with a layer's index, just before a forward enters the layer."""
        hooks = [
            layer.decoder.register_forward_pre_hook(lambda *_, index=index: reached(index))
            for index, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def as_heads(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of layer `index` as [tokens, kv_heads, head_dim]."""
        heads = self.layers[index].kv_heads
        return keys.view(len(keys), heads, -1), values.view(len(values), heads, -1)
