"""Moving keys: rotations of models that are not ours, undone and done again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.glm.modeling_glm import GlmConfig, GlmRotaryEmbedding
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rope
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from semkv_rag.blend import Rotary, rotary_candidates

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}


def llama(rope: dict[str, object] | None = None) -> LlamaRotaryEmbedding:
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=2048)
    if rope is not None:
        config.rope_parameters = rope
    return LlamaRotaryEmbedding(config)


def rotated(module: nn.Module, apply: object, keys: torch.Tensor, start: int) -> torch.Tensor:
    """`keys`, [tokens, heads, dim], as the model rotates them from position `start` on."""
    positions = torch.arange(start, start + len(keys))[None]
    cos, sin = module(keys, positions)
    states = keys.transpose(0, 1)[None]
    return apply(states, states, cos, sin)[1][0].transpose(0, 1)  # type: ignore[operator]


@pytest.mark.parametrize("shift", [1, 37, 1500, -100, 0])
@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn, whose mscale stays out"])
def test_halves(rope: dict[str, object] | None, shift: int) -> None:
    # Within 1: float32 rounds an angle at position 1,700 by up to 6e-5, and a key's error is that
    # times its length, which a normal distribution does not bound.
    module, keys = llama(rope), 2 * torch.rand(5, 2, 32) - 1
    halves, _ = rotary_candidates(module, 2048)
    before, after = (rotated(module, apply_rotary_pos_emb, keys, p) for p in (200, 200 + shift))
    assert torch.allclose(halves.rotate(before, shift), after, atol=2e-4)


def test_pairs_of_a_part_of_the_dimensions() -> None:
    config = GlmConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        partial_rotary_factor=0.5,
        pad_token_id=0,
    )
    module, keys = GlmRotaryEmbedding(config), torch.randn(5, 2, 32)
    _, pairs = rotary_candidates(module, 2048)
    before, after = (rotated(module, glm_rope, keys, p) for p in (10, 70))
    moved = pairs.rotate(before, 60)
    assert torch.allclose(moved, after, atol=1e-4)
    assert torch.equal(moved[..., 16:], before[..., 16:])


def test_moving_there_and_back() -> None:
    rotary = rotary_candidates(llama(), 512)[0]
    keys = torch.randn(3, 2, 32)
    assert torch.allclose(rotary.rotate(rotary.rotate(keys, 300), -300), keys, atol=1e-4)


def test_a_table_with_mscale_is_taken_at_unit_length() -> None:
    class Table(nn.Module):
        is_neox_style = True

        def __init__(self) -> None:
            super().__init__()
            angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1]))
            self.register_buffer(
                "cos_sin_cache", 1.3 * torch.cat((angles.cos(), angles.sin()), dim=-1)
            )

    (rotary,) = rotary_candidates(Table(), 64)
    keys = torch.randn(3, 2, 4)
    assert torch.allclose(rotary.rotate(keys, 5).norm(dim=-1), keys.norm(dim=-1), atol=1e-5)


def test_the_dtype_is_kept() -> None:
    rotary = rotary_candidates(llama(), 64)[0]
    assert rotary.rotate(torch.randn(3, 2, 32, dtype=torch.bfloat16), 7).dtype == torch.bfloat16


def test_what_is_no_rotary_module_gives_no_candidate() -> None:
    assert rotary_candidates(None, 64) == []
    assert rotary_candidates(nn.Linear(2, 2), 64) == []
    assert isinstance(rotary_candidates(llama(), 64)[0], Rotary)
