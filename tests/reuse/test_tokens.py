"""Token arrays."""

from __future__ import annotations

import numpy as np
import pytest

from semkv_rag.reuse import token_array


def test_lists_and_arrays_become_int32() -> None:
    for tokens in ([1, -2, 3], np.array([1, -2, 3]), np.array([1, 0, -2, 0, 3], np.int16)[::2]):
        array = token_array(tokens)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert array.tolist() == [1, -2, 3]
    assert token_array([]).shape == (0,)


def test_int32_arrays_are_not_copied() -> None:
    array = np.arange(5, dtype=np.int32)
    assert token_array(array) is array


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**32 + 5, 2**70])
def test_ids_beyond_32_bits_are_refused_not_cut(token: int) -> None:
    with pytest.raises(OverflowError):
        token_array([1, token])


def test_wide_arrays_are_refused_not_cut() -> None:
    with pytest.raises(OverflowError):
        token_array(np.array([2**32 + 5]))
