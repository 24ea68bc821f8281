"""The measure of agreement that needs no trained model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality.agreement import measure, one_row, reader, reader_prompts, yardstick_prompts
from benchmarks.quality.network import Model, Shape
from benchmarks.quality.reuse import prefill, whole


def test_agreement_is_perfect_when_everything_is_computed_and_falls_with_less() -> None:
    torch.manual_seed(5)
    found = measure(Model(Shape(layers=4)), yardstick_prompts(2))
    for rule in ("HKVD@1", "HKVD@2", "random", "chunk head"):
        assert found[f"{rule} 100"] == pytest.approx((0, 0), abs=1e-5)
        assert found[f"{rule} 0"][1] > 0.01
        assert found[f"{rule} 0"][1] > found[f"{rule} 30"][1]


def test_the_reader_answers_a_question_about_its_documents() -> None:
    """The prompts are what the model was made for: full prefill gives the demo's answers."""
    model, split = reader()
    prompts = reader_prompts(8, split)
    right = 0
    for chunks, question in prompts:
        batch = one_row((chunks, question))
        last, _ = prefill(model, batch, whole(batch))
        answer = int(model.logits(last[0, -1]).argmax())
        right += any(answer in chunk for chunk in chunks)
    assert right >= 7
