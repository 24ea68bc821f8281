"""What a question attends to, against torch's own attention."""

from __future__ import annotations

import pytest
import torch

from semkv_rag.blend import smoothed, squared_attention


def made(heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    queries = torch.randn(5, heads, 16, generator=generator)
    keys = torch.randn(12, kv_heads, 16, generator=generator)
    visible = torch.arange(12)[None] <= torch.arange(7, 12)[:, None]
    return queries, keys, visible


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_it_is_the_mean_square_of_attention_weights(heads: int, kv_heads: int) -> None:
    queries, keys, visible = made(heads, kv_heads)
    got = squared_attention(queries, keys, visible, scale=0.3)
    # Over values that are the unit vectors, attention gives its weights.
    weights = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        torch.eye(12).expand(1, kv_heads, -1, -1),
        attn_mask=visible,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(got, weights[0].square().mean((0, 1)))
    # The first eight keys are seen by all.
    for open_keys in (3, 8):
        again = squared_attention(queries, keys, visible, scale=0.3, open_keys=open_keys)
        assert torch.equal(again, got)


def test_a_softcap_bounds_the_logits() -> None:
    queries, keys, visible = made(4, 2)
    capped = squared_attention(queries * 1000, keys, visible, scale=1.0, softcap=0.01)
    # With next to no difference left, each question token gives all it sees the same.
    even = (visible / visible.sum(1, keepdim=True)).square().mean(0)
    torch.testing.assert_close(capped, even, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_sink_takes_its_part(heads: int, kv_heads: int) -> None:
    queries, keys, visible = made(heads, kv_heads)
    sinks = torch.linspace(-1, 2, heads)
    got = squared_attention(queries, keys, visible, scale=0.3, sinks=sinks)
    grouped = keys.repeat_interleave(heads // kv_heads, 1)
    exp = torch.einsum("qhd,khd->hqk", 0.3 * queries, grouped).exp() * visible
    weights = exp / (exp.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(got, weights.square().mean((0, 1)))


def test_neighbours_share_within_their_span() -> None:
    scores = torch.tensor([0.0, 3.0, 0.0, 0.0, 6.0, 0.0])
    ranks = torch.tensor([0, 1, 2, 3, 0, 1])
    assert smoothed(scores, ranks).tolist() == [1.0, 1.0, 1.0, 0.0, 2.0, 2.0]
    assert smoothed(scores, ranks, 2, 0).tolist() == [0.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert smoothed(scores, ranks, 0, 2).tolist() == [1.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    torch.testing.assert_close(
        smoothed(scores, ranks, 9, 9), torch.tensor([3 / 19] * 4 + [6 / 19] * 2)
    )
