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
    keys, values = fused[:, 4:8], fused[:, 8:]
    kept = [[torch.empty(640, 4, 64, dtype=dtype) for _ in "kv"] for _ in range(20)]
    made = [copier.copy((k[7:607], v[7:607]), (keys, values)) for k, v in kept]
    for future in made:
        if future is not None:
            future.result(timeout=30)
    for k, v in kept:
        assert torch.equal(k[7:607].float(), keys.float())
        assert torch.equal(v[7:607].float(), values.float())
    assert any(future is not None for future in made) is eager
    copier.close()


def test_small_rows_are_copied_at_once() -> None:
    copier, into = RowCopier(eager=True), torch.zeros(2, 3, 4, 64)
    assert copier.copy((into[0], into[1]), (torch.ones(3, 4, 64), torch.ones(3, 4, 64))) is None
    assert torch.equal(into, torch.ones_like(into))
    copier.close()


def test_no_more_than_a_few_wait() -> None:
    """What waits holds memory: behind a thread that does not get on, the model copies itself."""
    copier, go_on = RowCopier(eager=True), threading.Event()
    copier._thread.submit(go_on.wait, 30)
    into, rows = torch.zeros(3 * UNDER_WAY, 2, 512, 4, 64), torch.ones(512, 4, 64)
    made = [copier.copy((keys, values), (rows, rows)) for keys, values in into]
    assert sum(future is not None for future in made) == UNDER_WAY
    assert torch.equal(into[UNDER_WAY:], torch.ones_like(into[UNDER_WAY:]))
    go_on.set()
    copier.close()
    assert torch.equal(into, torch.ones_like(into))
