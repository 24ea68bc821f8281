"""Memory of captures: used again, and not without end."""

from __future__ import annotations

import pytest
import torch

from semkv_rag.engine import capture_memory
from semkv_rag.engine.capture_memory import CaptureMemory


def test_it_is_used_again() -> None:
    memory, like = CaptureMemory(), torch.zeros(1, 2, 8)
    first = memory.take(100, like)
    assert len(first) >= 100 and first.shape[1:] == (2, 8)
    other = memory.take(100, like)
    assert other.data_ptr() != first.data_ptr()
    memory.give([first])
    assert memory.take(90, like).data_ptr() == first.data_ptr(), "as many rows, rounded up"
    memory.give([first])
    for unlike in (torch.zeros(1, 2, 16), torch.zeros(1, 2, 8, dtype=torch.bfloat16)):
        assert memory.take(100, unlike).data_ptr() != first.data_ptr()


def test_it_keeps_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, like = CaptureMemory(), torch.zeros(1, 2, 8)
    tensors = [memory.take(64, like) for _ in range(3)]
    monkeypatch.setattr(capture_memory, "KEPT_BYTES", 2 * tensors[0].nbytes)
    memory.give(tensors)
    again = {memory.take(64, like).data_ptr() for _ in range(3)}
    assert len(again & {tensor.data_ptr() for tensor in tensors[:2]}) == 2
