"""The CacheBlend reference where its answer is known, and against a loop that computes picked rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from semkv_rag.config import ReuseOptions
from semkv_rag.reuse.plan import ReusePlan, Span
from tests.reference import ReferenceModel
from tests.reference.cacheblend import highest, with_neighbours
from tests.reference.conftest import (
    FIRST,
    PREFIX,
    QUESTION,
    SECOND,
    Case,
    LoadModel,
    mixed_case,
)

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all


@pytest.mark.parametrize(
    "options",
    [{"ratio": 1.0}, {"selector": "all"}, {"ratio": 1.0, "selector": "chunk_head"}],
    ids=str,
)
def test_full_recompute_is_full_prefill(model: ReferenceModel, options: dict[str, object]) -> None:
    case = mixed_case(model)
    result = model.blend(case.prompt, case.plan(**options), case.stored)
    torch.testing.assert_close(result.logprobs, model.logprobs(case.prompt), atol=1e-4, rtol=0)
    assert len(result.picked) == case.plan().reused_tokens


@pytest.mark.parametrize("selector", ["kv_deviation", "none", "chunk_head"])
def test_exact_spans_are_full_prefill_without_recompute(
    model: ReferenceModel, selector: str
) -> None:
    prompt = PREFIX + FIRST + SECOND + QUESTION
    spans = (
        Span("first", src=0, dst=7, length=24, base=7, exact=True),
        Span("second", src=0, dst=31, length=24, base=31, exact=True),
    )
    stored = {"first": model.stored(PREFIX, FIRST), "second": model.stored(PREFIX + FIRST, SECOND)}
    plan = ReusePlan(spans, 55, ReuseOptions(selector=selector))
    result = model.blend(prompt, plan, stored)
    torch.testing.assert_close(result.logprobs, model.logprobs(prompt), atol=1e-4, rtol=0)
    assert result.picked == ()


def test_exact_tokens_come_from_the_store(model: ReferenceModel) -> None:
    case = mixed_case(model)
    wrong = model.stored(PREFIX, SECOND)
    result = model.blend(case.prompt, case.plan(ratio=1.0), {**case.stored, "first": wrong})
    for (keys, values), (wrong_keys, wrong_values) in zip(result.layers, wrong, strict=True):
        torch.testing.assert_close(keys[7:31], wrong_keys, atol=1e-5, rtol=0)
        assert torch.equal(values[7:31], wrong_values)


@pytest.mark.parametrize("check_layer", [1, 2])
def test_layers_up_to_the_check_layer_are_fresh(model: ReferenceModel, check_layer: int) -> None:
    case = mixed_case(model)
    cache = DynamicCache()
    model.hf(torch.tensor([case.prompt]), past_key_values=cache)
    plan = case.plan(ratio=0.02, check_layer=check_layer, selector="kv_deviation")
    result = model.blend(case.prompt, plan, case.stored)
    for layer, (keys, values) in enumerate(result.layers):
        full = cache.layers[layer]
        full_keys, full_values = model.turned(full.keys[0], full.values[0])
        same = torch.allclose(keys, full_keys, atol=1e-4) and torch.allclose(
            values, full_values, atol=1e-4
        )
        assert same == (layer <= check_layer)


def test_the_highest_deviations_are_picked(model: ReferenceModel) -> None:
    case = mixed_case(model)
    plan = case.plan(ratio=0.2, selector="kv_deviation")
    result = model.blend(case.prompt, plan, case.stored)
    assert result.deviation is not None
    assert len(result.picked) == round(0.2 * plan.reused_tokens)
    reused = {position for span in case.spans if not span.exact for position in _places(span)}
    assert set(result.picked) <= reused
    left_out = max(result.deviation[position] for position in reused - set(result.picked))
    assert min(result.deviation[position] for position in result.picked) >= left_out


def test_equal_deviations_go_to_the_lower_positions() -> None:
    deviation = torch.tensor([9.0, 2.0, 2.0, 5.0, 2.0, 1.0])
    candidates = torch.tensor([False, True, True, True, True, True])
    assert highest(deviation, candidates, 3).nonzero().flatten().tolist() == [1, 2, 3]


def test_chunk_head_takes_the_first_tokens_of_every_inexact_span(load_model: LoadModel) -> None:
    model = load_model("qwen3")
    case = mixed_case(model)
    result = model.blend(case.prompt, case.plan(selector="chunk_head", ratio=7 / 65), case.stored)
    assert result.picked == (31, 32, 33, 52, 53, 76, 77)
    given = model.blend(case.prompt, case.plan(selector="by_chance"), case.stored, result.picked)
    assert torch.equal(given.logprobs, result.logprobs)


def test_by_chance_needs_rows_and_takes_reused_ones_only(load_model: LoadModel) -> None:
    model = load_model("qwen3")
    case = mixed_case(model)
    plan = case.plan(selector="by_chance")
    with pytest.raises(ValueError, match="by_chance needs rows"):
        model.blend(case.prompt, plan, case.stored)
    for row in (0, 8, 49, len(case.prompt) - 1):  # prefix, exact, between, question
        with pytest.raises(ValueError, match="rows"):
            model.blend(case.prompt, plan, case.stored, [row])


LOOPS = [
    *(
        (arch, "kv_deviation", ratio)
        for arch in ("llama", "qwen3", "qwen2_yarn", "olmo2", "glm")
        for ratio in (0.02, 0.15, 0.5)
    ),
]


@pytest.mark.parametrize(("arch", "selector", "ratio"), LOOPS)
@pytest.mark.parametrize("check_layer", [1, 2])
def test_the_loop_over_picked_rows_agrees(
    load_model: LoadModel, arch: str, check_layer: int, selector: str, ratio: float
) -> None:
    model = load_model(arch)
    case = mixed_case(model)
    plan = case.plan(ratio=ratio, check_layer=check_layer, selector=selector)
    result = model.blend(case.prompt, plan, case.stored)
    logprobs, picked = _picked_rows_only(model, case, plan, len(result.picked))
    assert list(result.picked) == picked
    torch.testing.assert_close(result.logprobs, logprobs, atol=1e-4, rtol=0)


def test_what_the_question_attends_to_over_right_kv_is_the_models_own_attention(
    load_model: LoadModel,
) -> None:
    model = load_model("gemma2")  # with a soft cap
    prompt = PREFIX + FIRST + SECOND + QUESTION
    spans = (
        Span("first", src=0, dst=7, length=24, base=7, exact=True),
        Span("second", src=0, dst=31, length=24, base=31),
    )
    stored = {"first": model.stored(PREFIX, FIRST), "second": model.stored(PREFIX + FIRST, SECOND)}
    plan = ReusePlan(spans, 55, ReuseOptions(selector="query_attention", ratio=0.5)).asking(prompt)
    asked = model.asked(prompt, plan, stored)
    hf = model.hf(torch.tensor([prompt]), output_attentions=True)
    weights = torch.cat(hf.attentions)[:, :, 55:, 31:]
    shares = weights / weights.sum(-1, keepdim=True)
    expected = shares[1:].square().mean((1, 2)).sqrt().mean(0)[:24]
    torch.testing.assert_close(asked[31:55], expected, atol=1e-5, rtol=0)
    assert asked[:31].isnan().all() and asked[55:].isnan().all()


@pytest.mark.parametrize("selector", ["query_attention", "deviation_x_attention"])
def test_query_aware_selectors_pick_what_scores_highest(
    load_model: LoadModel, selector: str
) -> None:
    model = load_model("qwen3")
    case = mixed_case(model)
    plan = case.plan(ratio=0.2, selector=selector).asking(case.prompt)
    result = model.blend(case.prompt, plan, case.stored)
    score = with_neighbours(model.asked(case.prompt, plan, case.stored), plan)
    if selector == "deviation_x_attention":
        assert result.deviation is not None
        score = score * result.deviation
    order = score.nan_to_num(-1).argsort(descending=True)[:13].tolist()
    assert result.picked == tuple(sorted(order))
    other = replace(plan, question=replace(plan.question, tokens=tuple(SECOND[:9])))
    assert model.blend(case.prompt, other, case.stored).picked != result.picked


def _places(span: Span) -> range:
    return range(span.dst, span.end)


class _Given(DynamicCache):
    """Notes one layer's fresh K and V, and hands attention what `store` holds after taking them."""

    def __init__(self, store: dict[int, list[Tensor]], rows: list[int]) -> None:
        super().__init__()
        self.store, self.rows = store, rows
        self.fresh: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.fresh = (key_states, value_states)
        keys, values = self.store[layer_idx]
        keys[:, :, self.rows], values[:, :, self.rows] = key_states, value_states
        return keys, values


@torch.inference_mode()
def _picked_rows_only(
    model: ReferenceModel, case: Case, plan: ReusePlan, count: int
) -> tuple[Tensor, list[int]]:
    """CacheBlend as it saves work: a row that is not picked is not computed above the check layer.

    For models with `embed_tokens`, `layers`, `rotary_emb` and `norm`. One token's deviation at a time.

    Args:
        count: how many rows go on behind the check layer.
    """
    decoder, tokens = model.hf.get_decoder(), len(case.prompt)
    config = decoder.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    store = {
        layer: [torch.zeros(1, config.num_key_value_heads, tokens, head_dim) for _ in "kv"]
        for layer in range(len(decoder.layers))
    }
    for span in case.spans:
        moved = model.moved(case.stored[span.chunk_id], span.dst - span.src)
        for layer, pair in enumerate(moved):
            for into, source in zip(store[layer], pair, strict=True):
                for offset, position in enumerate(_places(span)):
                    into[0, :, position] = source[span.src + offset]
    exact = {place for span in case.spans if span.exact for place in _places(span)}
    reused = [place for span in case.spans if not span.exact for place in _places(span)]

    rows = [place for place in range(tokens) if place not in exact]
    hidden = decoder.embed_tokens(torch.tensor([case.prompt]))[:, rows]
    picked: list[int] = []
    for index, layer in enumerate(decoder.layers):
        was = [part.clone() for part in store[index]]
        cache = _Given(store, rows)
        after = _run_layer(decoder, layer, hidden, rows, tokens, cache)
        if index == plan.options.check_layer:
            deviation = {}
            for place in reused:
                total = 0.0
                assert cache.fresh is not None
                for fresh, stored in zip(cache.fresh, was, strict=True):
                    difference = fresh[0, :, rows.index(place)] - stored[0, :, place]
                    total += float((difference**2).sum())
                deviation[place] = total
            ranked = sorted(reused, key=lambda place: (-deviation[place], place))
            picked = sorted(ranked[:count])
            kept = [i for i, place in enumerate(rows) if place not in reused or place in picked]
            after, rows = after[:, kept], [rows[i] for i in kept]
        hidden = after
    logits = model.hf.lm_head(decoder.norm(hidden))[0, -1]
    return logits.log_softmax(-1), picked


def _run_layer(
    decoder: Any,
    layer: Any,
    hidden: Tensor,
    rows: list[int],
    tokens: int,
    cache: DynamicCache,
) -> Tensor:
    positions = torch.tensor([rows])
    mask = torch.full((1, 1, len(rows), tokens), torch.finfo(torch.float32).min)
    for query, row in enumerate(rows):
        mask[0, 0, query, : row + 1] = 0
    output: Tensor = layer(
        hidden,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=decoder.rotary_emb(hidden, positions),
        past_key_values=cache,
    )
    return output
