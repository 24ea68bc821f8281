"""The yardstick's masks and blends, against the same thing done one token or one question at a time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.quality import grammar, rules, words
from workbench.quality.batches import QUESTION_LENGTH, Batch, collate, masks
from workbench.quality.export import export, load
from workbench.quality.network import Model, Shape, rotate
from workbench.quality.reuse import KV, Blend, blend, pick, prefill, right, whole

SMALL = grammar.Recipe(documents=(2, 2), chunks=(2, 2), sentences=(2, 3), first_roots=(1, 1))


@pytest.fixture(scope="module")
def batch() -> Batch:
    draw = random.Random(2)
    contexts = [grammar.make_context(draw, SMALL, held=True) for _ in range(2)]
    return collate([(c, c.facts[-4:]) for c in contexts])


def test_masks_let_each_token_see_what_it_should(batch: Batch) -> None:
    hide = torch.tensor([True, False])
    for groups in (whole(batch), batch.documents, batch.chunks):
        context, questions = masks(batch, groups, hide)
        for row, length in enumerate(batch.lengths.tolist()):
            for here in range(length):
                seen = (context[row, 0, here] == 0).nonzero().flatten().tolist()
                group = groups[row, here]
                assert seen == [j for j in range(here + 1) if groups[row, j] == group]
        for asked in batch.asked:
            for step in range(3):
                column = asked.column + step
                visible = questions[asked.row, 0, column - batch.split] == 0
                own = range(asked.column - 2, column + 1)
                chunk = [
                    j
                    for j in range(int(batch.lengths[asked.row]))
                    if not hide[asked.row] or batch.chunks[asked.row, j] == asked.fact.chunk
                ]
                assert visible.nonzero().flatten().tolist() == [*chunk, *own]


def test_a_question_is_answered_as_if_it_stood_alone_behind_its_context(
    model: Model, batch: Batch
) -> None:
    last, _ = prefill(model, batch, whole(batch))
    for asked in batch.asked:
        length = int(batch.lengths[asked.row])
        tokens = torch.cat(
            [
                batch.tokens[asked.row, :length],
                batch.tokens[asked.row, asked.column - 2 : asked.column + QUESTION_LENGTH - 2],
            ]
        )
        plain = _plain_forward(model, tokens[None])
        expected = plain[0, length + 2]
        torch.testing.assert_close(last[asked.row, asked.column], expected, rtol=1e-4, atol=1e-4)


def test_chunks_are_computed_as_if_alone_but_for_where_they_stand(
    model: Model, batch: Batch
) -> None:
    _, stored = prefill(model, batch, batch.chunks)
    inside = (batch.chunks[0] == 1).nonzero().flatten()
    alone = _plain_kv(model, batch.tokens[0, inside][None])
    start = torch.full((1, len(inside)), int(inside[0]))
    for (key, value), (lone_key, lone_value) in zip(stored, alone, strict=True):
        turned = rotate(lone_key, model.turn(start, torch.float32))
        torch.testing.assert_close(key[:1, :, inside], turned, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(value[:1, :, inside], lone_value, rtol=1e-4, atol=1e-4)


def test_everything_computed_is_full_prefill_and_nothing_is_plain_reuse(
    model: Model, batch: Batch
) -> None:
    full, _ = prefill(model, batch, whole(batch))
    reused, stored = prefill(model, batch, batch.chunks)
    questions = [(a.row, a.column + step) for a in batch.asked for step in range(3)]
    rows, columns = map(list, zip(*questions, strict=True))
    for check in (-1, 0, 1, 2):
        everything, _ = blend(model, batch, stored, Blend(1.0, rules.by_chance(1), check))
        torch.testing.assert_close(everything[rows, columns], full[rows, columns])
    nothing, _ = blend(model, batch, stored, Blend(0.0, rules.by_chance(1), -1))
    torch.testing.assert_close(nothing[rows, columns], reused[rows, columns])
    assert not torch.allclose(full[rows, columns], reused[rows, columns], atol=1e-3)


@pytest.mark.parametrize("keep_check", [True, False])
def test_a_blend_is_what_computing_only_the_picked_tokens_gives(
    model: Model, batch: Batch, keep_check: bool
) -> None:
    _, stored = prefill(model, batch, batch.chunks)
    how = Blend(0.3, rules.by_deviation, check=1, keep_check=keep_check)
    last, picked = blend(model, batch, stored, how)
    for asked in batch.asked[:: len(batch.asked) - 1]:
        expected = _blend_by_hand(model, batch, stored, asked.row, asked.column, picked, keep_check)
        torch.testing.assert_close(last[asked.row, asked.column], expected, rtol=1e-4, atol=1e-4)


def _blend_by_hand(
    model: Model,
    batch: Batch,
    stored: KV,
    row: int,
    column: int,
    picked: Tensor,
    keep_check: bool,
) -> Tensor:
    """The check layer is 1: one row, hidden states of the picked tokens only above it."""
    length = int(batch.lengths[row])
    at = torch.cat([torch.arange(length), torch.arange(column - 2, column + 1)])
    tokens = batch.tokens[row, at][None]
    x = model.embed_tokens(tokens)
    places = torch.arange(length + 3)
    going = places.clone()
    for index, layer in enumerate(model.blocks()):
        query, key, value = layer.self_attn.project(
            layer.input_layernorm(x), model.turn(places[going][None], torch.float32)
        )
        if index >= 1:
            old_key, old_value = (s[row : row + 1, :, :length] for s in stored[index])
            fresh = picked[row, :length].nonzero().flatten()
            if index == 1:
                if keep_check:
                    fresh = torch.arange(length)
                going = torch.cat([picked[row, :length].nonzero().flatten(), places[length:]])
                x, query = x[:, going], query[:, :, going]
                new_key, new_value = key, value
            else:
                new_key = torch.zeros(1, key.shape[1], length + 3, key.shape[3])
                new_value = new_key.clone()
                new_key[:, :, going], new_value[:, :, going] = key, value
            key, value = new_key.clone(), new_value.clone()
            key[:, :, :length], value[:, :, :length] = old_key, old_value
            key[:, :, fresh], value[:, :, fresh] = new_key[:, :, fresh], new_value[:, :, fresh]
        scores = query @ key.mT * model.shape.head_dim**-0.5
        scores = scores.masked_fill(places[None, :] > going[:, None], float("-inf"))
        mixed = (torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2)
        x = x + layer.self_attn.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    last: Tensor = x[0, -1]
    return last


def _plain_forward(model: Model, tokens: Tensor) -> Tensor:
    return model.states(tokens, torch.arange(tokens.shape[1])[None], _causal(tokens))[-1]


def _plain_kv(model: Model, tokens: Tensor) -> KV:
    kept: KV = []

    def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((key, value))
        return key, value

    places = torch.arange(tokens.shape[1])[None]
    model.states(tokens, places, _causal(tokens), [keep] * len(model.layers))
    return kept


def _causal(tokens: Tensor) -> tuple[Tensor, Tensor]:
    count = tokens.shape[1]
    mask = torch.full((1, 1, count, count), -1e4).triu(1)
    return mask, mask.new_zeros(1, 1, 0, count)


def test_pick_counts_each_context_by_its_own_length() -> None:
    scores = torch.arange(12.0).view(2, 6)
    picked = pick(scores, torch.tensor([6, 4]), 0.5)
    assert picked.tolist() == [[False] * 3 + [True] * 3, [False] * 2 + [True] * 2 + [False] * 2]


def test_an_answer_is_right_only_as_a_whole(model: Model, batch: Batch) -> None:
    """Hidden states that spell every answer, and then one of its words changed."""
    table = model.embed_tokens.weight.detach()
    last = torch.zeros(*batch.tokens.shape, model.shape.hidden)
    unlike = table - table.mean(0)
    for asked in batch.asked:
        for step, word in enumerate(asked.fact.answer):
            last[asked.row, asked.column + step] = 50 * unlike[word]
    assert right(model, batch, last) == [True] * len(batch.asked)
    asked = batch.asked[1]
    last[asked.row, asked.column + len(asked.fact.answer) - 1] = 50 * unlike[3]
    assert right(model, batch, last) == [i != 1 for i in range(len(batch.asked))]


def test_an_exported_model_is_the_same_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(3)
    export(Model(Shape()), tmp_path)
    model = load(tmp_path)
    context = grammar.make_context(random.Random(4), held=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(words.text(context.tokens), return_tensors="pt").input_ids
    assert tokens[0].tolist() == context.tokens
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = model.logits(_plain_forward(model, tokens))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
