"""Sensitivity: what it measures, and the byte that it is kept in."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from semkv_rag.blend import decoded, encoded, sensitivity_of


def test_it_is_the_distance_over_all_heads() -> None:
    values = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    others = values.clone()
    others[1] = 1.0
    others[2, 0, 0] = -2.0
    torch.testing.assert_close(sensitivity_of(values, others), torch.tensor([0.0, 8**0.5, 2.0]))


@given(st.lists(st.floats(2**-15, 2**15), min_size=1))
def test_a_byte_keeps_it_within_five_percent(values: list[float]) -> None:
    given = torch.tensor(values)
    codes = encoded(given)
    assert codes.dtype is torch.uint8
    torch.testing.assert_close(decoded(codes), given, rtol=0.045, atol=0)
    assert encoded(decoded(codes)).tolist() == codes.tolist()


def test_the_ends() -> None:
    given = torch.tensor([0.0, 1e-30, 1e30, torch.inf])
    codes = encoded(given)
    assert codes.tolist() == [0, 1, 255, 255]
    assert decoded(codes).isfinite().all() and decoded(codes)[0] == 0
