"""Stored KV as it is: one mask, a cache filled piece by piece, and the blend that picks nothing."""

from __future__ import annotations

import torch

from tests.reference import ReferenceModel, masked, piece_by_piece
from tests.reference.conftest import mixed_case


def test_a_mask_and_a_filled_cache_and_the_blend_agree(model: ReferenceModel) -> None:
    case = mixed_case(model)
    plan = case.plan(selector="none")
    by_mask = masked(model, case.prompt, plan, case.stored)
    for logprobs in (
        piece_by_piece(model, case.prompt, plan, case.stored),
        model.blend(case.prompt, plan, case.stored).logprobs,
    ):
        torch.testing.assert_close(logprobs, by_mask, atol=1e-4, rtol=0)


def test_it_is_not_full_prefill(model: ReferenceModel) -> None:
    case = mixed_case(model)
    logprobs = masked(model, case.prompt, case.plan(selector="none"), case.stored)
    assert (logprobs - model.logprobs(case.prompt)).abs().max() > 1e-2
