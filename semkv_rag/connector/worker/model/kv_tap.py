"""The KV tap: one place through which every layer's keys and values pass.

vLLM's attention hands all freshly computed K and V to `impl.do_kv_cache_update`, in plain
`[tokens, kv_heads, head_dim]` whatever the backend's cache layout. The tap wraps that call on each layer;
`layer.py` knows its arguments for each kind of layer. A handler sees K and V before they are written.
With no handler set the tap costs one attribute look-up. `write` uses the same call to put K and V into
the paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from semkv_rag.connector.worker.model.layer import Layer

Handler: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with (layer index, K, V, slots) before they are written; may raise to stop the forward."""

Asker: TypeAlias = Callable[[int, Tensor, Any], None]
"""Called with (layer index, queries, attention) before the attention; may raise to stop the forward."""


class KVTap:
    """Wraps the cache update of `layers`; one per worker, installed once."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.handler: Handler | None = None
        self._layers = layers
        self._update: list[Callable[..., None]] = []
        for index, layer in enumerate(layers):
            update = layer.attention.impl.do_kv_cache_update
            self._update.append(update)
            tapped = layer.tapped(update, partial(self._handle, index))
            layer.attention.impl.do_kv_cache_update = tapped

    def _handle(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        if self.handler is not None:
            self.handler(index, keys, values, slots)

    @contextmanager
    def handling(self, handler: Handler) -> Iterator[None]:
        """Have `handler` see K and V inside the block."""
        before, self.handler = self.handler, handler
        try:
            yield
        finally:
            self.handler = before

    @contextmanager
    def asking(self, asker: Asker) -> Iterator[None]:
        """Have `asker` see the queries inside the block, [tokens, heads, head_dim]."""
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                stack.enter_context(layer.asking(partial(asker, index)))
            yield

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put K and V, [tokens, kv_heads, head_dim], into layer `index`'s paged cache at `slots`.

        Raises:
            ValueError: the rows do not fit the slots or the cache. The kernel behind it would not
                notice and write over other memory.
        """
        layer = self._layers[index]
        for tensor, what in ((keys, "keys"), (values, "values")):
            if tensor.shape[:2] != (len(slots), layer.kv_heads):
                raise ValueError(
                    f"{what} of {tuple(tensor.shape)} for {len(slots)} slots of "
                    f"{layer.kv_heads} heads"
                )
        if len(slots):
            layer.write(self._update[index], keys.contiguous(), values.contiguous(), slots)
