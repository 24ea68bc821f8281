"""What tests of the yardstick share.

One thread: its tensors are so small that more cost time on a busy machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from workbench.quality.network import Model, Shape


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    """Random weights, large enough that every token's attention counts."""
    torch.manual_seed(1)
    model = Model(Shape(layers=4))
    with torch.no_grad():
        for name, weight in model.layers.named_parameters():
            if weight.ndim == 2:
                weight.mul_(2.0 if "proj" in name else 1.0)
    return model
