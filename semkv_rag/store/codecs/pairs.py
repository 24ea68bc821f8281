"""Codecs that code K and V each for itself, and the ones that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import torch
from torch import Tensor

from semkv_rag.store.codecs.codec import Bring, Codec, HeadShape, Layout, Scratch
from semkv_rag.store.codecs.coded import Coded
from semkv_rag.store.codecs.coders import Channels, Coder, Fp8, Rows4, Rows8, Same

Part = TypeVar("Part")


class PairCodec(Codec):
    """One coder for K, and one for V.

    Args:
        name: the codec's.
    """

    def __init__(self, name: str, keys: Coder, values: Coder) -> None:
        self.name = name
        self.lossless = keys.lossless and values.lossless
        self._coders = (("k", keys), ("v", values))
        self.names = tuple(which + tail for which, coder in self._coders for tail in coder.names)
        self.bounded = tuple(name for name in self.names if "." in name)

    def layout(
        self, tokens: int, key_shape: HeadShape, value_shape: HeadShape, dtype: torch.dtype
    ) -> Layout:
        return {
            which + tail: entry
            for (which, coder), shape in zip(self._coders, (key_shape, value_shape), strict=True)
            for tail, entry in coder.layout(tokens, shape, dtype).items()
        }

    def shapes(self, found: Mapping[str, tuple[int, ...]]) -> tuple[HeadShape, HeadShape]:
        keys, values = (coder.shape(_own(found, which, coder)) for which, coder in self._coders)
        return keys, values

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {
            which + tail: part
            for (which, coder), tensor in zip(self._coders, (keys, values), strict=True)
            for tail, part in coder.encode(tensor).items()
        }

    def decode(
        self,
        parts: Mapping[str, Tensor],
        rows: slice,
        dtype: torch.dtype,
        bring: Bring,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        decoded = []
        for which, coder in self._coders:
            numbers = coder.decode(_own(parts, which, coder), rows, bring, scratch)
            if not coder.lossless:
                # The next one's numbers come into the same memory.
                place = scratch.take(which, tuple(numbers.shape), dtype, numbers.device)
                numbers = place.copy_(numbers)
            decoded.append(numbers)
        return decoded[0], decoded[1]

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> tuple[Coded, Coded]:
        keys, values = (
            coder.coded(_own(parts, which, coder), rows) for which, coder in self._coders
        )
        return keys, values

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        for which, coder in self._coders:
            own = {tail: parts[which + tail] for tail in coder.names if which + tail in parts}
            if fault := coder.fault(own, dtype):
                return fault
        return None


def _own(parts: Mapping[str, Part], which: str, coder: Coder) -> dict[str, Part]:
    return {tail: parts[which + tail] for tail in coder.names}


CODECS: Final = (
    PairCodec("plain", Same(), Same()),
    PairCodec("fp8", Fp8(), Fp8()),
    PairCodec("int8", Channels(8, group=512), Rows8()),
    PairCodec("k8v4", Channels(8, group=512), Rows4(group=32)),
    PairCodec("int4", Channels(4, group=64), Rows4(group=32)),
)
"""The codecs that there are, in the order in which they are listed for people."""
