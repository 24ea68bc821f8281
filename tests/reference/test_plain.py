"""Full prefill against transformers' own generation."""

from __future__ import annotations

import torch

from tests.reference import ReferenceModel
from tests.reference.conftest import QUESTION
from tests.reference.plain import causal


def test_greedy_is_what_transformers_generates(model: ReferenceModel) -> None:
    tokens, logprobs = model.greedy(QUESTION, 4)
    generated = model.hf.generate(
        torch.tensor([QUESTION]), max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    assert tokens == generated[0, len(QUESTION) :].tolist()
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(4))


def test_forward_with_a_causal_mask_is_full_prefill(model: ReferenceModel) -> None:
    order = torch.arange(len(QUESTION))
    logprobs = model.forward(QUESTION, order, causal(order, order))
    torch.testing.assert_close(logprobs[-1], model.logprobs(QUESTION), atol=1e-4, rtol=0)
