"""What a forward computes of one request, and who looks on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from semkv_rag.connector.adapter import Adapter
from semkv_rag.connector.worker.model.prompt_images import PromptImages


class Watcher:
    """Looks at a slice while it is computed, layer by layer.

    Attributes:
        asks: whether `ask` is to be called, which lets the forward go on to the last layer's queries.
    """

    asks: ClassVar[bool] = False

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """The slice's fresh K and V of a layer are about to be written; its attention reads the cache
        behind that.

        Args:
            positions: the slice's, [tokens], int64, ascending.
            keys, values: [tokens, kv_heads, head_dim].
        """

    def ask(self, index: int, queries: Tensor, attention: Any) -> None:
        """The slice's K and V of a layer are written, and its queries known.

        Args:
            queries: [tokens, heads, head_dim].
            attention: vLLM's implementation of the layer's attention.
        """

    def end(self) -> None:
        """The last layer is computed."""


NOBODY = Watcher()


@dataclass(frozen=True, eq=False)
class Slice:
    """Tokens of one request.

    Attributes:
        tokens: their ids.
        blocks: the request's, in order, [groups, blocks], int64.
        positions: [tokens], int64, ascending.
        watcher: who looks on.
        adapter: that the rows are computed with; None for the model alone.
        images: of the request; None where none of its images is computed.
    """

    tokens: Sequence[int]
    blocks: Tensor
    positions: Tensor
    watcher: Watcher = NOBODY
    adapter: Adapter | None = None
    images: PromptImages | None = None
