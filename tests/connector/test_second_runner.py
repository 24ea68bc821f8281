"""What differs with vLLM's second model runner, on objects that have what is read of vLLM's.

It needs Triton, which vLLM's build for the CPU comes without.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from semkv_rag.connector.worker.model.rewind import rewind


class Staged:
    """As vLLM's `StagedWriteTensor`, one number a row."""

    def __init__(self, *values: int) -> None:
        self.gpu = torch.tensor(values)
        self._staged: list[tuple[int, int]] = []

    def stage_write_elem(self, index: int, value: int) -> None:
        self._staged.append((index, value))

    def apply_write(self) -> None:
        for index, value in self._staged:
            self.gpu[index] = value
        self._staged.clear()


def test_a_request_that_went_back_is_counted_from_there() -> None:
    states = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 2, "c": 1},
        num_computed_tokens=Staged(80, 50, 96),  # on the device, behind the last step
        num_computed_tokens_np=np.array([64, 49, 64]),  # before it
        prefill_len=SimpleNamespace(np=np.array([120, 40, 95])),
        total_len=Staged(120, 51, 96),  # `b` has been given a token
    )
    cached = SimpleNamespace(
        req_ids=["a", "b", "c", "unknown"], num_computed_tokens=[80, 32, 50, 7]
    )
    rewind(states, cached)
    assert states.num_computed_tokens.gpu.tolist() == [80, 50, 32]
    assert states.total_len.gpu.tolist() == [120, 51, 95]
