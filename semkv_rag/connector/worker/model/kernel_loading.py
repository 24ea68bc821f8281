"""Stored KV into the blocks by a kernel of our own, where Triton runs; see `load_kernel`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.strides import require_triton, strides_of
from semkv_rag.store.codecs import EncodedLayer
from semkv_rag.store.codecs.coded import Coded, Join


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
        encoded: Sequence[EncodedLayer],
        rows: Sequence[slice],
        slots: Tensor,
        *,
        matrices: Tensor | None,
        join: Join,
    ) -> bool:
        """Write K and V of some spans to a layer's cache at `slots`.

        False: the kernel cannot decode them.

        Args:
            encoded: that layer of each span's chunk.
            rows: which of the chunk's tokens.
            slots: of the first span's tokens, then the next one's, [tokens], int64.
            matrices: the rotations that move K, [spans, head_dim, head_dim], in its dtype; None where all
                K stay.
            join: puts tensors one behind the other on the cache's device.

        Raises:
            ValueError: they do not fit the slots or the cache.
        """
        layout = self._layouts[index]
        cache = layout.attention.kv_cache
        keys, values = list[Coded](), list[Coded]()
        for one, some in zip(encoded, rows, strict=True):
            both = one.coded(some)
            if both is None or one.dtype != cache.dtype:
                return False
            keys.append(both[0])
            values.append(both[1])
        for numbers, (_, *shape) in zip((keys, values), layout.shapes, strict=True):
            if not all(one.like(numbers[0]) for one in numbers):
                return False
            tokens = sum(len(one.codes) for one in numbers)
            if tokens != len(slots) or [*numbers[0].shape] != shape:
                raise ValueError(
                    f"{tokens} tokens of {numbers[0].shape} for {len(slots)} slots of {shape}"
                )
        if not len(slots):
            return True
        both_where = self._strides[index]
        for numbers, where, own in zip((keys, values), both_where, (matrices, None), strict=True):
            self._load(
                cache,
                numbers,
                slots,
                where,
                block_size=self._paged.block_size,
                join=join,
                matrices=own,
            )
        return True
