"""Stored KV into the blocks by a kernel of our own, where Triton runs; see `load_kernel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.strides import require_triton, strides_of
from semkv_rag.store.codecs import EncodedLayer


class KernelLoading:
    """Takes the place of decoding, moving and vLLM's write.

    Raises:
        NotImplementedError: the kernel does not do what these layers need; the message says what.
    """

    def __init__(
        self, layers: Sequence[Layer], layouts: Sequence[BlockLayout], paged: PagedKV
    ) -> None:
        require_triton(layers, paged)
        from semkv_rag.connector.worker.model.load_kernel import load

        self._load, self._paged, self._layouts = load, paged, layouts
        self._strides = [strides_of(layout, paged) for layout in layouts]

    def write(
        self,
        index: int,
        encoded: EncodedLayer,
        rows: slice,
        slots: Tensor,
        *,
        matrix: Tensor | None,
        bring: Callable[[Tensor], Tensor],
    ) -> bool:
        """Write some tokens' K and V to a layer's cache at `slots`; False: the kernel cannot decode them.

        Args:
            encoded: that layer of a chunk.
            rows: which of the chunk's tokens.
            slots: [tokens], int64.
            matrix: the rotation that moves K, [head_dim, head_dim], in its dtype; None where K stays.
            bring: gives a tensor on the cache's device.

        Raises:
            ValueError: they do not fit the slots or the cache.
        """
        layout = self._layouts[index]
        cache = layout.attention.kv_cache
        both = encoded.coded(rows)
        if both is None or encoded.dtype != cache.dtype:
            return False
        for one, (_, *shape) in zip(both, layout.shapes, strict=True):
            if len(one.codes) != len(slots) or [*one.shape] != shape:
                raise ValueError(
                    f"{len(one.codes)} tokens of {one.shape} for {len(slots)} slots of {shape}"
                )
        if not len(slots):
            return True
        for one, where, own in zip(both, self._strides[index], (matrix, None), strict=True):
            self._load(
                cache,
                one.brought(bring),
                slots,
                where,
                block_size=self._paged.block_size,
                matrix=own,
            )
        return True
