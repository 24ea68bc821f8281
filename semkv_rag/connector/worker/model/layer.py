"""One decoder layer as blends see it. Its cache holds K and V of heads.

Layers with another kind of cache are another class (`latent.py`). The kinds differ in what passes through
the KV tap, in how it is written, and in what queries are multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from semkv_rag.blend import Rotary
from semkv_rag.connector.worker.model.replaced import Forward, replaced

Update: TypeAlias = Callable[..., None]
"""vLLM's `do_kv_cache_update` of a layer's attention implementation, whose arguments differ by kind."""

See: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""Called with K, V and slots before they are written."""

Asked: TypeAlias = Callable[[Tensor, Any], None]
"""Called with queries, [tokens, heads, head_dim], and vLLM's implementation, before the attention."""


@dataclass(eq=False)
class Layer:
    """A layer whose cache holds K and V of each head.

    Attributes:
        attention: vLLM's attention module; its `impl` writes the paged KV cache.
        decoder: the module that takes the hidden states of the layer's tokens.
        candidates: how keys may be rotated; None stands for a layer without rope.
        rotary: the candidate that gives the model's own keys, once the gate has found it.
    """

    attention: Any
    decoder: nn.Module
    candidates: list[Rotary | None]
    rotary: Rotary | None = None

    asks_values: ClassVar[bool] = False
    """Whether queries fall on K and V together, and not on K alone."""

    by_token: ClassVar[bool] = False
    """Whether vLLM's attention is given each token as a sequence of its own, and not each run."""

    @property
    def kv_heads(self) -> int:
        return int(self.attention.num_kv_heads)

    @property
    def window(self) -> int | None:
        """How many tokens each token attends to at most, itself among them; None for all before it."""
        window = self.attention.sliding_window
        return None if window is None else int(window)

    @property
    def sinks(self) -> Tensor | None:
        """A logit for each head of this rank that takes part in the softmax and has no value, [heads]."""
        sinks: Tensor | None = getattr(self.attention.impl, "sinks", None)
        return sinks

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """`(kv_heads, head_dim)` of K and of V on this rank."""
        attention = self.attention
        return (
            (self.kv_heads, int(attention.head_size)),
            (self.kv_heads, int(attention.head_size_v)),
        )

    @property
    def backend(self) -> str:
        """The name of vLLM's attention backend."""
        name: str = self.attention.get_attn_backend().get_name()
        return name

    def tapped(self, update: Update, see: See) -> Update:
        """`update` with a look at what it is given before it is written."""

        def tapped(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            see(key, value, slots)
            update(layer, key, value, cache, slots)

        return tapped

    def write(self, update: Update, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put K and V, [tokens, kv_heads, head_dim], into the layer's cache at `slots`, by `update`."""
        update(self.attention, keys, values, self.attention.kv_cache, slots)

    def asking(self, asked: Asked) -> AbstractContextManager[None]:
        """Inside the block `asked` is called with the queries."""
        impl = self.attention.impl

        def wrap(forward: Forward) -> Forward:
            def before(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
                asked(unquantised(layer, query), impl)
                return forward(layer, query, *args, **kwargs)

            return before

        return replaced(impl, wrap)

    def attended(self, keys: Tensor, values: Tensor) -> Tensor:
        """What the queries of `asking` fall on, [tokens, kv_heads, head_dim]."""
        return keys

    # What the attention check makes up and compares.

    @property
    def query_dim(self) -> int:
        """The size of each head of the queries that the attention module is given."""
        return self.kv_shapes[0][1]

    def alike(self, queries: Tensor) -> Tensor:
        """Keys that are like queries of [tokens, heads, query_dim]: [tokens, kv_heads, head_dim]."""
        return queries.view(len(queries), self.kv_heads, -1, self.query_dim).mean(2)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """vLLM's attention: [tokens, heads * value_dim]. K and V are written."""
        output: Tensor = self.attention(*(one.flatten(1) for one in (queries, keys, values)))
        return output

    def of_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as the queries of `attend` meet them, [tokens, heads of K, dim] each.

        Raises:
            NotImplementedError: that cannot be told.
        """
        return keys, values


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
