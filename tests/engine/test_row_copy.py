"""Copies beside the model: the same rows arrive, whoever makes them."""

from __future__ import annotations

import threading

import pytest
import torch

from semkv_rag.engine.row_copy import UNDER_WAY, RowCopier

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_arrive(dtype: torch.dtype, eager: bool) -> None:
    copier = RowCopier(eager)
    fused = torch.randn(600, 12, 64).to(dtype)  # a layer's Q, K and V in one piece of memory
    kept = [torch.empty(640, 4, 64, dtype=dtype) for _ in range(40)]
    made = [copier.copy(into[7:607], fused[:, 4:8]) for into in kept]
    for future in made:
        if future is not None:
            future.result(timeout=30)
    assert all(torch.equal(into[7:607].float(), fused[:, 4:8].float()) for into in kept)
    assert any(future is not None for future in made) is eager
    copier.close()


def test_small_rows_are_copied_at_once() -> None:
    copier, into = RowCopier(eager=True), torch.zeros(3, 4, 64)
    assert copier.copy(into, torch.ones(3, 4, 64)) is None
    assert torch.equal(into, torch.ones(3, 4, 64))
    copier.close()


def test_no_more_than_a_few_wait() -> None:
    """What waits holds memory: behind a thread that does not get on, the model copies itself."""
    copier, go_on = RowCopier(eager=True), threading.Event()
    copier._thread.submit(go_on.wait, 30)
    into, rows = torch.zeros(3 * UNDER_WAY, 512, 4, 64), torch.ones(512, 4, 64)
    made = [copier.copy(one, rows) for one in into]
    assert sum(future is not None for future in made) == UNDER_WAY
    assert torch.equal(into[UNDER_WAY:], torch.ones_like(into[UNDER_WAY:]))
    go_on.set()
    copier.close()
    assert torch.equal(into, torch.ones_like(into))
