"""What a codec is: K and V of a layer as a fixed set of named tensors, and back.

Files and memory hold the tensors. The thread that loads a blend decodes them on the model's device, just
before it writes K and V into the blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from semkv_rag.store.codecs.coded import Coded

Layout: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors' dtypes and shapes by name, in their order."""

HeadShape: TypeAlias = tuple[int, int]
"""`(kv_heads, head_dim)`."""

Bring: TypeAlias = Callable[[Tensor], Tensor]
"""Gives a tensor on the device on which it is decoded."""

LOSSY_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""What a lossy codec takes."""

_LARGEST: Final = 1e38
_SHARE: Final = 0.96


class Scratch:
    """Memory for decoding that is used again: what was taken under a name is overwritten by the next."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of any content."""
        count = 1
        for side in shape:
            count *= side
        kept = self._memory.get((name, dtype))
        if kept is None or len(kept) < count or kept.device != device:
            kept = self._memory[name, dtype] = torch.empty(count, dtype=dtype, device=device)
        return kept[:count].view(shape)


class Codec(ABC):
    """One way to store K and V. Has no state: one object serves all threads.

    Attributes:
        name: by which it is chosen, and which stands in files and in the index. Never means another
            layout of the tensors than it does today: a better one takes another name.
        lossless: whether decoding gives the same bits. Else no span of its chunks is exact.
        names: of its tensors, in the order of a file.
        bounded: those of them that `fault` looks at.
    """

    name: str
    lossless: bool
    names: tuple[str, ...]
    bounded: tuple[str, ...] = ()

    @abstractmethod
    def layout(
        self, tokens: int, key_shape: HeadShape, value_shape: HeadShape, dtype: torch.dtype
    ) -> Layout:
        """What its tensors are, for K and V of so many tokens.

        Args:
            key_shape, value_shape: `(kv_heads, head_dim)`.
            dtype: of K and V.

        Raises:
            ValueError: it cannot hold such K and V; says why.
        """

    @abstractmethod
    def shapes(self, found: Mapping[str, tuple[int, ...]]) -> tuple[HeadShape, HeadShape]:
        """`(kv_heads, head_dim)` of K and of V, by the shapes of its tensors.

        Raises:
            ValueError: these are no shapes of its tensors. Not all such are found: `layout` tells.
        """

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The tensors for K and V, each [tokens, kv_heads, head_dim], all finite."""

    @abstractmethod
    def decode(
        self,
        parts: Mapping[str, Tensor],
        rows: slice,
        dtype: torch.dtype,
        bring: Bring,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        """K and V of the tokens `rows`, each [rows, kv_heads, head_dim].

        Args:
            dtype: of K and V.
            scratch: may hold what is returned.
        """

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> tuple[Coded, Coded] | None:
        """K and V of the tokens `rows` for a kernel that decodes them; None where only `decode` can."""
        return None

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        """Why what the tensors decode to is not sure to be finite, in words, or None.

        Args:
            parts: at least those of `bounded`, all finite.
        """
        return None

    def bytes_per_token(
        self, key_shape: HeadShape, value_shape: HeadShape, dtype: torch.dtype, tokens: int = 512
    ) -> float:
        """What a layer takes, by token, in chunks of so many."""
        layout = self.layout(tokens, key_shape, value_shape, dtype)
        sizes = (torch.Size(shape).numel() * kind.itemsize for kind, shape in layout.values())
        return sum(sizes) / tokens


@dataclass(frozen=True, slots=True)
class EncodedLayer:
    """K and V of a layer, as they are stored.

    Attributes:
        parts: the codec's tensors, on the CPU.
        dtype: of K and V.
    """

    codec: Codec
    parts: Mapping[str, Tensor]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(part.nbytes for part in self.parts.values())

    def decode(
        self,
        rows: slice = slice(None),
        *,
        bring: Bring = lambda part: part,
        scratch: Scratch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """K and V of some tokens, each [rows, kv_heads, head_dim].

        Args:
            rows: which; without a step.
            bring: called with what is needed of each tensor.
            scratch: memory that what is returned may stand in, until it is given to another call.
        """
        return self.codec.decode(self.parts, rows, self.dtype, bring, scratch or Scratch())

    def coded(self, rows: slice) -> tuple[Coded, Coded] | None:
        """K and V of some tokens for a kernel that decodes them; None where only `decode` can."""
        return self.codec.coded(self.parts, rows)


def as_numbers(tensor: Tensor) -> Tensor:
    """K or V as float32 that a lossy codec can hold: at most 0.96 of the dtype's largest, and 1e38.

    What is larger is cut to it; no model computes that.
    """
    largest = min(_SHARE * torch.finfo(tensor.dtype).max, _LARGEST)
    return tensor.float().clamp(-largest, largest)


def rounded_up(scale: Tensor) -> Tensor:
    """Scales, float32 and not negative, as the next bfloat16 that is not below."""
    near = scale.bfloat16()
    # Of positive numbers the next one is the next integer by the bits.
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < scale, above, near)


def divided(numbers: Tensor, scale: Tensor) -> Tensor:
    """Numbers over their scale, float32. Where the scale is 0 so are the numbers, and they stay."""
    scale = scale.float()
    return numbers / torch.where(scale == 0, 1.0, scale)


def overflow(scale: Tensor, middle: Tensor | None, reach: float, dtype: torch.dtype) -> str | None:
    """Whether scales are none, or lead beyond a dtype's numbers, or float32's on the way there.

    Args:
        reach: the largest code, without its sign.
    """
    if not scale.numel():
        return None
    if bool((scale < 0).any()):
        return "a scale is negative"
    most = scale.float() * reach
    center = most.new_zeros(()) if middle is None else middle.float().abs()
    at_end, on_the_way = float((center + most).max()), float((center + 2 * most).max())
    if at_end > torch.finfo(dtype).max or on_the_way > torch.finfo(torch.float32).max:
        return "a scale or a middle is too large"
    return None
