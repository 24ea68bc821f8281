"""Memory of captures: used again, and not without end."""

from __future__ import annotations

import threading

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


def test_captures_beyond_its_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CaptureMemory()
    tensor = memory.take(SHAPE, LIKE)
    monkeypatch.setattr(capture_memory, "MOST_BYTES", tensor.untyped_storage().nbytes())
    assert not memory.has_room(0.0)
    other = threading.Timer(0.05, memory.give, [tensor])
    other.start()
    assert memory.has_room(60.0)
    other.join()


def test_a_device_copies_into_pinned_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return torch.zeros(size, dtype=dtype)

    on_device = torch.zeros(1, dtype=torch.int16, device="meta")
    monkeypatch.setattr(capture_memory.torch, "empty", empty)
    taken = CaptureMemory().take(SHAPE, on_device)
    assert taken.device.type == "cpu"
    assert pinned == [True]
