"""The measure of agreement that needs no trained model."""

from __future__ import annotations

import pytest
import torch

from workbench.quality import agreement
from workbench.quality.agreement import as_case, measure, reader, reader_prompts, yardstick_prompts
from workbench.quality.network import Model, Shape
from workbench.quality.passes import read


@pytest.mark.slow
def test_agreement_is_perfect_when_everything_is_computed_and_falls_with_less() -> None:
    torch.manual_seed(5)
    found = measure(Model(Shape(layers=4)), yardstick_prompts(2))
    for selector in agreement.SELECTORS:
        all_, some, none = (found[f"{selector.name} {ratio}"] for ratio in (100, 30, 0))
        assert (all_.divergence, all_.error) == pytest.approx((0, 0), abs=1e-5)
        assert none.error > 0.01
        assert none.error > some.error
        assert none.charged < some.charged


@pytest.mark.slow
def test_the_reader_answers_a_question_about_its_documents() -> None:
    """The prompts are what the model was made for: full prefill gives the right answers."""
    model, split = reader()
    prompts = reader_prompts(8, split)
    right = 0
    for chunks, question in prompts:
        case = as_case(model, (chunks, question))
        lengths, tokens = case.questions.contexts.lengths, case.questions.tokens
        last = read(model, case.cached(case.fresh.kv), lengths, tokens)
        answer = int(model.logits(last[0, 0, -1]).argmax())
        right += any(answer in chunk for chunk in chunks)
    assert right >= 7
