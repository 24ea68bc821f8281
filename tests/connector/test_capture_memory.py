"""Memory of captures: used again, and not without end."""

from __future__ import annotations

import pytest
import torch

from semkv_rag.connector.worker.capture import capture_memory
from semkv_rag.connector.worker.capture.capture_memory import CaptureMemory

LIKE = torch.zeros(1, dtype=torch.int16)
SHAPE = torch.Size((30, 2, 8))


def test_it_is_used_again() -> None:
    memory = CaptureMemory()
    first = memory.take(SHAPE, LIKE)
    assert (first.shape, first.dtype, first.is_contiguous()) == (SHAPE, LIKE.dtype, True)
    other = memory.take(SHAPE, LIKE)
    assert other.data_ptr() != first.data_ptr()
    memory.give(first)
    similar = memory.take(torch.Size((2, 29, 8)), LIKE)
    assert similar.data_ptr() == first.data_ptr(), "about as large"
    memory.give(similar)
    for size in (torch.Size((60, 2, 8)), torch.Size((20, 2, 8))):
        assert memory.take(size, LIKE).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("size", [1, 7, 8, 1000, 1 << 20, (1 << 20) + 1])
def test_little_is_wasted(size: int) -> None:
    taken = CaptureMemory().take(torch.Size((size,)), LIKE).untyped_storage().nbytes() // 2
    assert size <= taken <= size * 9 / 8


def test_it_keeps_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CaptureMemory()
    tensors = [memory.take(SHAPE, LIKE) for _ in range(3)]
    monkeypatch.setattr(capture_memory, "KEPT_BYTES", 2 * tensors[0].untyped_storage().nbytes())
    for tensor in tensors:
        memory.give(tensor)
    again = {memory.take(SHAPE, LIKE).data_ptr() for _ in range(3)}
    assert len(again & {tensor.data_ptr() for tensor in tensors}) == 2
