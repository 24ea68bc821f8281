"""The KV tap: one place through which every layer's keys and values pass.

vLLM's attention hands all freshly computed K and V to `impl.do_kv_cache_update`, in plain
`[tokens, kv_heads, head_dim]` whatever the backend's cache layout. The tap wraps that call on each
layer. With no handler set it costs one attribute look-up; a handler sees K and V before they are
written. `write` is the same call used the other way: it puts K and V into the paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from semkv_rag.connector.worker.model.model_view import Layer
from semkv_rag.connector.worker.model.replaced import Forward, replaced

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
            layer.attention.impl.do_kv_cache_update = self._wrap(index, update)

    def _wrap(self, index: int, update: Callable[..., None]) -> Callable[..., None]:
        def tapped(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            if self.handler is not None:
                self.handler(index, key, value, slots)
            update(layer, key, value, cache, slots)

        return tapped

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
                impl = layer.attention.impl
                stack.enter_context(
                    replaced(impl, partial(_asked_before, partial(asker, index), impl))
                )
            yield

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put K and V, [tokens, kv_heads, head_dim], into layer `index`'s paged cache at `slots`.

        Raises:
            ValueError: the rows do not fit the slots or the cache. The kernel behind it would not
                notice and write over other memory.
        """
        attention = self._layers[index].attention
        for tensor, what in ((keys, "keys"), (values, "values")):
            if tensor.shape[:2] != (len(slots), attention.num_kv_heads):
                raise ValueError(
                    f"{what} of {tuple(tensor.shape)} for {len(slots)} slots of "
                    f"{attention.num_kv_heads} heads"
                )
        if len(slots):
            self._update[index](
                attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots
            )


def unquantised(attention: Any, queries: Tensor) -> Tensor:
    """Queries as numbers: with an 8-bit cache vLLM may quantise them before its attention.

    Args:
        attention: vLLM's attention module. Its scale is one number, or one for each of the keys' heads.
        queries: [tokens, heads, head_dim].
    """
    if queries.dtype.itemsize > 1:
        return queries
    scale: Tensor = attention._q_scale.float().flatten()
    scale = scale.repeat_interleave(queries.shape[1] // len(scale))
    return queries.float() * scale[:, None]


def _asked_before(asker: Callable[[Tensor, Any], None], impl: Any, forward: Forward) -> Forward:
    def asked(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asker(unquantised(layer, query), impl)
        return forward(layer, query, *args, **kwargs)

    return asked
