"""Whether a tensor is all numbers: NaN or infinity in one stored value would spread over an answer.

Asked for every tensor that is written, and when a tensor of a file is read for the first time, so on the
path to the first token. `torch.isfinite` takes more than ten times as long as reading the tensor does,
and is not there for all dtypes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from typing import Final

import numpy as np
import torch
from torch import Tensor

_BITS: Final = {
    torch.float32: ("<i4", "<u4", 0x7F800000, 0xFF800000),
    torch.float16: ("<i2", "<u2", 0x7C00, 0xFC00),
    torch.bfloat16: ("<i2", "<u2", 0x7F80, 0xFF80),
    torch.float8_e4m3fn: ("<i1", "<u1", 0x7F, 0xFF),
    torch.float8_e5m2: ("<i1", "<u1", 0x7C, 0xFC),
}
"""Integers of a number's width, and the least bits that are no number, without and with the sign."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, not copied."""
    if not tensor.nbytes:
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().data.cast("B")


def is_finite(tensor: Tensor, content: memoryview) -> bool:
    """Whether a tensor holds neither NaN nor infinity; integers never do.

    Of the bits without the sign, those of numbers are the smaller ones. So the greatest of the bits as
    signed integers tells of what has the sign 0, and as unsigned ones of what has the sign 1.

    Args:
        tensor: contiguous and on the CPU.
        content: its memory, see `raw_bytes`.
    """
    bits = _BITS.get(tensor.dtype)
    if bits is None or not content:
        return True
    if tensor.dtype is torch.float32 and math.isfinite(tensor.sum().item()):
        return True  # once through instead of twice; a sum of numbers may be infinite, too
    signed, unsigned, positive, negative = bits
    greatest = np.maximum.reduce
    return bool(
        greatest(np.frombuffer(content, signed)) < positive
        and greatest(np.frombuffer(content, unsigned)) < negative
    )


FILES_KNOWN: Final = 65_536
"""Files that are remembered; beyond it the one that was not read for longest is forgotten."""

SETTLED_NS: Final = 2 * 10**9
"""A file that was changed since is not remembered yet: another change may leave it the same times."""


class KnownFinite:
    """Which tensors of which files were all numbers when they were read. Safe for threads.

    A file is known by its inode and the times of its last change, which whoever alters it alters too. The
    checksum of what is read is compared all the same: this says of the same bytes only that they need
    not be looked through again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def of(self, file: tuple[int, ...]) -> int:
        """The tensors of a file that are known: one bit for each, in the order of the file."""
        with self._lock:
            if file in self._tensors:
                self._tensors.move_to_end(file)
            return self._tensors.get(file, 0)

    def add(self, file: tuple[int, ...], tensors: int) -> None:
        """These are all numbers, too."""
        with self._lock:
            self._tensors[file] = self._tensors.get(file, 0) | tensors
            if len(self._tensors) > FILES_KNOWN:
                self._tensors.popitem(last=False)


def identity_of(stat: os.stat_result) -> tuple[int, ...] | None:
    """What tells a file and its content from all others on this machine; None while it is too new."""
    if time.time_ns() - max(stat.st_ctime_ns, stat.st_mtime_ns) < SETTLED_NS:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
