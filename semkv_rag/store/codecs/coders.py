"""Coders of one tensor, K or V, [tokens, heads, dim]; a `PairCodec` has one for each.

Numbers become codes of 8 or 4 bits around a middle, times a scale. Keys have channels that are large in
every token, so a channel has its own scale over many tokens; values have none, so a token has its own.

Decoding is on the path to the first token: whole tensors at a time, in float32, in memory that is used
again. Two codes of 4 bits stand in a byte, the first half of a token's numbers in the low bits and the
second in the high ones, so that both are unpacked as long rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from semkv_rag.store.codecs.codec import (
    LOSSY_DTYPES,
    Bring,
    HeadShape,
    Layout,
    Scratch,
    as_numbers,
    divided,
    overflow,
    rounded_up,
)
from semkv_rag.store.codecs.coded import Coded
from semkv_rag.store.codecs.codes import around_middle, packed, signed, unpacked

MULTIPLE = 4
"""What a head's size must be a multiple of, for lossy coders: then tensors have even numbers of bytes."""

FP8_LARGEST = 448.0
_FP8_BITS = -0x4080
"""The sign, and the bits of a float16 that an e4m3 number has: 0xBF80."""


class Coder(ABC):
    """Codes K, or V, and decodes it.

    Attributes:
        names: its tensors, as they are called behind `k` or `v`.
        lossless: as a codec's.
    """

    names: tuple[str, ...]
    lossless = False

    @abstractmethod
    def layout(self, tokens: int, shape: HeadShape, dtype: torch.dtype) -> Layout:
        """As a codec's."""

    @abstractmethod
    def shape(self, found: Mapping[str, tuple[int, ...]]) -> HeadShape:
        """As a codec's."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        """As a codec's."""

    @abstractmethod
    def decode(
        self, parts: Mapping[str, Tensor], rows: slice, bring: Bring, scratch: Scratch
    ) -> Tensor:
        """[rows, heads, dim]: the tensor itself, or in float32, maybe in the scratch memory."""

    @abstractmethod
    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> Coded:
        """What a kernel needs to decode the tokens `rows`."""

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        """As a codec's."""
        return None


class Same(Coder):
    """The numbers as they are."""

    names = ("",)
    lossless = True

    def layout(self, tokens: int, shape: HeadShape, dtype: torch.dtype) -> Layout:
        return {"": (dtype, (tokens, *shape))}

    def shape(self, found: Mapping[str, tuple[int, ...]]) -> HeadShape:
        return heads_of(found[""])

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        return {"": tensor}

    def decode(
        self, parts: Mapping[str, Tensor], rows: slice, bring: Bring, scratch: Scratch
    ) -> Tensor:
        return bring(parts[""][rows])

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> Coded:
        return Coded(heads_of(parts[""].shape), parts[""][rows])


class Fp8(Coder):
    """float8 (e4m3fn), with a scale for each token and head."""

    names = ("", ".scale")

    def layout(self, tokens: int, shape: HeadShape, dtype: torch.dtype) -> Layout:
        require(shape, dtype)
        return {
            "": (torch.float8_e4m3fn, (tokens, *shape)),
            ".scale": (torch.bfloat16, (tokens, shape[0])),
        }

    def shape(self, found: Mapping[str, tuple[int, ...]]) -> HeadShape:
        return heads_of(found[""])

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        numbers = as_numbers(tensor)
        scale = rounded_up(numbers.abs().amax(-1) / FP8_LARGEST)
        scaled = divided(numbers, scale[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST)
        return {"": scaled.to(torch.float8_e4m3fn), ".scale": scale}

    def decode(
        self, parts: Mapping[str, Tensor], rows: slice, bring: Bring, scratch: Scratch
    ) -> Tensor:
        codes = bring(parts[""][rows])
        # torch's own conversion takes each number apart, ten times as slow. Moved by 7 bits an e4m3
        # number is a float16, 2 ** 8 times as small.
        bits = scratch.take("bits", codes.shape, torch.int16, codes.device)
        bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(_FP8_BITS)
        numbers = scratch.take("numbers", codes.shape, torch.float32, codes.device)
        numbers.copy_(bits.view(torch.float16))
        numbers.mul_(bring(parts[".scale"][rows]).float().mul_(2**8)[..., None])
        return numbers

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> Coded:
        return by_token(parts, rows)

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        return overflow(parts[".scale"], None, FP8_LARGEST, dtype)


class Rows8(Coder):
    """8 bits, with a scale for each token and head."""

    names = ("", ".scale")

    def layout(self, tokens: int, shape: HeadShape, dtype: torch.dtype) -> Layout:
        require(shape, dtype)
        return {"": (torch.int8, (tokens, *shape)), ".scale": (torch.bfloat16, (tokens, shape[0]))}

    def shape(self, found: Mapping[str, tuple[int, ...]]) -> HeadShape:
        return heads_of(found[""])

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        numbers = as_numbers(tensor)
        scale = rounded_up(numbers.abs().amax(-1) / 127)
        return {"": signed(divided(numbers, scale[..., None])), ".scale": scale}

    def decode(
        self, parts: Mapping[str, Tensor], rows: slice, bring: Bring, scratch: Scratch
    ) -> Tensor:
        codes = bring(parts[""][rows])
        numbers = scratch.take("numbers", codes.shape, torch.float32, codes.device).copy_(codes)
        numbers.mul_(bring(parts[".scale"][rows]).float()[..., None])
        return numbers

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> Coded:
        return by_token(parts, rows)

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        return overflow(parts[".scale"], None, 128, dtype)


class Rows4(Coder):
    """4 bits, with a scale and a middle for each token, head and group of dimensions.

    Args:
        group: dimensions of a group; where a head is no multiple of it, all of the head are one.
    """

    names = ("", ".scale", ".middle")

    def __init__(self, group: int) -> None:
        self._group = group

    def layout(self, tokens: int, shape: HeadShape, dtype: torch.dtype) -> Layout:
        require(shape, dtype)
        heads, size = shape
        groups = (tokens, heads, size // self._size(size))
        return {
            "": (torch.uint8, (tokens, heads * size // 2)),
            ".scale": (torch.bfloat16, groups),
            ".middle": (torch.bfloat16, groups),
        }

    def shape(self, found: Mapping[str, tuple[int, ...]]) -> HeadShape:
        codes, scale = found[""], found[".scale"]
        if len(codes) != 2 or len(scale) != 3 or not scale[1] or 2 * codes[1] % scale[1]:
            raise ValueError("its values' codes and scales do not belong together")
        return scale[1], 2 * codes[1] // scale[1]

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        tokens, heads, size = tensor.shape
        grouped = as_numbers(tensor).view(tokens, heads, -1, self._size(size))
        scale, middle, codes = around_middle(grouped, -1, 7.5)
        return {
            "": packed((codes + 7.5).view(tokens, -1)),
            ".scale": scale.squeeze(-1),
            ".middle": middle.squeeze(-1),
        }

    def decode(
        self, parts: Mapping[str, Tensor], rows: slice, bring: Bring, scratch: Scratch
    ) -> Tensor:
        scale = bring(parts[".scale"][rows]).float()
        middle = bring(parts[".middle"][rows]).float().sub_(scale, alpha=7.5)
        numbers = unpacked(bring(parts[""][rows]), scratch)
        tokens, heads, groups = scale.shape
        grouped = numbers.view(tokens, heads, groups, numbers.shape[1] // (heads * groups))
        grouped.mul_(scale[..., None]).add_(middle[..., None])
        return numbers.view(tokens, heads, -1)

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> Coded:
        scale, codes = parts[".scale"], parts[""]
        shape = scale.shape[1], 2 * codes.shape[1] // scale.shape[1]
        return Coded(shape, codes[rows], scale[rows], parts[".middle"][rows])

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        return overflow(parts[".scale"], parts[".middle"], 7.5, dtype)

    def _size(self, head_size: int) -> int:
        return self._group if head_size % self._group == 0 else head_size


class Channels(Coder):
    """8 or 4 bits, with a scale and a middle for each channel, over a group of tokens.

    Args:
        bits: 8 or 4.
        group: tokens of a group; the last one may have fewer.
    """

    names = ("", ".scale", ".middle")

    def __init__(self, bits: int, group: int) -> None:
        self._bits, self._group = bits, group
        self._reach = 127.0 if bits == 8 else 7.5

    def layout(self, tokens: int, shape: HeadShape, dtype: torch.dtype) -> Layout:
        require(shape, dtype)
        heads, size = shape
        codes: tuple[torch.dtype, tuple[int, ...]]
        codes = (torch.int8, (tokens, *shape))
        if self._bits == 4:
            codes = (torch.uint8, (tokens, heads * size // 2))
        groups = (-(-tokens // self._group), *shape)
        return {
            "": codes,
            ".scale": (torch.bfloat16, groups),
            ".middle": (torch.bfloat16, groups),
        }

    def shape(self, found: Mapping[str, tuple[int, ...]]) -> HeadShape:
        return heads_of(found[".scale"])

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = [
            around_middle(group, 0, self._reach)
            for group in torch.split(as_numbers(tensor), self._group)
        ]
        codes = torch.cat([part[2] for part in parts])
        eight = self._bits == 8
        return {
            "": signed(codes) if eight else packed((codes + 7.5).view(len(codes), -1)),
            ".scale": torch.cat([part[0] for part in parts]),
            ".middle": torch.cat([part[1] for part in parts]),
        }

    def decode(
        self, parts: Mapping[str, Tensor], rows: slice, bring: Bring, scratch: Scratch
    ) -> Tensor:
        begin, first, last = self._groups(parts, rows)
        scale = bring(parts[".scale"][first:last]).float()
        middle = bring(parts[".middle"][first:last]).float()
        codes = bring(parts[""][rows])
        if self._bits == 8:
            numbers = scratch.take("numbers", codes.shape, torch.float32, codes.device).copy_(codes)
        else:
            middle.sub_(scale, alpha=7.5)
            numbers = unpacked(codes, scratch).view(-1, *scale.shape[1:])
        for index in range(last - first):
            place = (first + index) * self._group - begin
            group = numbers[max(place, 0) : place + self._group]
            torch.addcmul(middle[index], group, scale[index], out=group)
        return numbers

    def coded(self, parts: Mapping[str, Tensor], rows: slice) -> Coded:
        begin, first, last = self._groups(parts, rows)
        scale, middle = parts[".scale"][first:last], parts[".middle"][first:last]
        shape = scale.shape[1], scale.shape[2]
        begin -= first * self._group
        return Coded(shape, parts[""][rows], scale, middle, self._group, begin)

    def _groups(self, parts: Mapping[str, Tensor], rows: slice) -> tuple[int, int, int]:
        """The first of `rows`, the first group that they are of, and the one behind the last."""
        begin, end, _ = rows.indices(len(parts[""]))
        return begin, begin // self._group, -(-end // self._group)

    def fault(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> str | None:
        reach = 128 if self._bits == 8 else self._reach
        return overflow(parts[".scale"], parts[".middle"], reach, dtype)


def by_token(parts: Mapping[str, Tensor], rows: slice) -> Coded:
    """What a kernel needs of codes, [tokens, heads, dim], that have a scale for each token and head."""
    return Coded(heads_of(parts[""].shape), parts[""][rows], parts[".scale"][rows][..., None])


def require(shape: HeadShape, dtype: torch.dtype) -> None:
    """Raise ValueError unless a lossy coder can hold such a tensor."""
    if dtype not in LOSSY_DTYPES:
        raise ValueError(f"a lossy codec cannot hold {str(dtype).removeprefix('torch.')}")
    if shape[0] < 1 or shape[1] < 1 or shape[1] % MULTIPLE:
        raise ValueError(
            f"heads of {shape[1]} numbers: a lossy codec takes multiples of {MULTIPLE}"
        )


def heads_of(shape: tuple[int, ...]) -> HeadShape:
    """Heads and their size, of a shape [rows, heads, dim].

    Raises:
        ValueError: it is no such shape.
    """
    if len(shape) != 3:
        raise ValueError(f"{list(shape)} is not [rows, kv_heads, head_dim]")
    return shape[1], shape[2]
