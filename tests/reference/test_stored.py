"""Stored KV against transformers' own cache, and moved keys against a model run further on."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.reference import ReferenceModel
from tests.reference.conftest import FIRST, OTHER_CONTEXT, PREFIX
from tests.reference.plain import causal


def test_stored_kv_is_the_cache_of_context_and_chunk(model: ReferenceModel) -> None:
    cache = DynamicCache()
    model.hf(torch.tensor([PREFIX + FIRST]), past_key_values=cache)
    stored = model.stored(PREFIX, FIRST)
    assert len(stored) == len(cache.layers)
    for (keys, values), layer in zip(stored, cache.layers, strict=True):
        chunk = slice(len(PREFIX), None)
        cached = model.turned(layer.keys[0, :, chunk], layer.values[0, :, chunk])
        torch.testing.assert_close((keys, values), cached)


@pytest.mark.parametrize("position", [len(PREFIX), 400])
def test_moved_keys_are_those_of_the_whole_run_moved(model: ReferenceModel, position: int) -> None:
    """RoPE is relative: with the context moved along, the model computes the same keys there."""
    stored = model.stored(PREFIX, FIRST)
    moved = model.moved(stored, position)
    cache = DynamicCache()
    order = torch.arange(len(PREFIX + FIRST))
    model.forward(PREFIX + FIRST, order + position - len(PREFIX), causal(order, order), cache)
    for layer, cached in enumerate(cache.layers):
        keys, _ = model.turned(cached.keys[0], cached.values[0])
        keys = keys[len(PREFIX) :]
        torch.testing.assert_close(moved[layer][0], keys, atol=1e-4, rtol=0)
        assert torch.equal(moved[layer][1], stored[layer][1])


def test_keys_move_left_of_where_the_context_would_begin(model: ReferenceModel) -> None:
    """Layer 0 sees no context, so its keys are those behind any two tokens; the others are turned."""
    stored = model.stored(OTHER_CONTEXT, FIRST)
    moved = model.moved(stored, 2)
    torch.testing.assert_close(moved[0], model.stored(PREFIX[:2], FIRST)[0], atol=1e-4, rtol=0)
    for (keys, _), (moved_keys, _) in zip(stored, moved, strict=True):
        torch.testing.assert_close(moved_keys.norm(dim=-1), keys.norm(dim=-1), atol=1e-4, rtol=0)
        assert not torch.allclose(moved_keys, keys, atol=1e-2)


def test_a_context_changes_keys_and_values_from_layer_1_on(model: ReferenceModel) -> None:
    alone = model.moved(model.stored([], FIRST), len(PREFIX))
    behind = model.stored(PREFIX, FIRST)
    torch.testing.assert_close(alone[0], behind[0], atol=1e-5, rtol=0)
    for layer in range(1, len(behind)):
        assert not torch.allclose(alone[layer][1], behind[layer][1], atol=1e-2)
