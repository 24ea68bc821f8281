"""The rows that a blend computes and no others: picked tokens, and questions, over a cache of KV.

A cache holds each layer's keys and values, [rows, heads, columns, head_dim]. The columns are a context's
`split`, then one where rows that fill up a batch write and that nobody reads, then those of questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from workbench.quality.network import Block, Model
from workbench.quality.reuse import KV

Narrow = Callable[[int, Tensor, Tensor], Tensor]
"""Takes a layer, and its keys and values of the rows [rows, heads, picked, head_dim]; gives the columns
that go on behind it, as `fill` takes them, with `split` for those that don't."""


@dataclass
class Seen:
    """Each layer's queries and keys of what was run, [rows, heads, tokens, head_dim]."""

    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)


def cache_of(kv: KV, room: int, times: int = 1) -> KV:
    """A cache of its own, `times` for each context, with `room` columns for questions."""

    def copied(each: Tensor) -> Tensor:
        rows, heads, split, size = each.shape
        copy = each.new_empty(rows, times, heads, split + 1 + room, size)
        copy[:, :, :, :split] = each[:, None]
        copy[:, :, :, split] = 0
        return copy.flatten(0, 1)

    return [(copied(key), copied(value)) for key, value in kv]


def columns_of(picked: list[Tensor], split: int) -> Tensor:
    """Each row's picked columns, filled up with `split`, [rows, most picked], int64."""
    most = max((len(each) for each in picked), default=0)
    columns = torch.full((len(picked), most), split)
    for row, each in enumerate(picked):
        columns[row, : len(each)] = each
    return columns


@torch.no_grad()
def fill(
    model: Model,
    cache: KV,
    states: Tensor,
    columns: Tensor,
    *,
    first: int = 0,
    seen: Seen | None = None,
    narrow: Narrow | None = None,
) -> None:
    """Compute picked tokens and write their KV into the cache.

    Args:
        states: the input of layer `first` of each token, [rows, split, hidden].
        columns: of the picked ones, [rows, picked], `split` where a row has fewer.
        first: the layer to begin with.
    """
    split = states.shape[1]
    rows = torch.arange(len(columns))[:, None]
    if not columns.shape[1]:
        return
    x = states[rows, columns.clamp(max=split - 1)]
    turn = model.turn(columns, x.dtype)
    order = torch.arange(split + 1)
    for index, block in enumerate(model.blocks()[first:], first):
        query, key, value = block.self_attn.project(block.input_layernorm(x), turn)
        keys, values = cache[index]
        keys[rows, :, columns] = key.transpose(1, 2)
        values[rows, :, columns] = value.transpose(1, 2)
        if seen is not None:
            seen.queries.append(query)
            seen.keys.append(key)
        if index == len(model.layers) - 1:
            return  # nobody reads what a picked token's last layer gives
        visible = order <= columns[:, :, None]
        x = _behind_attention(
            block, x, query, keys[:, :, : split + 1], values[:, :, : split + 1], visible
        )
        if narrow is not None:
            columns = narrow(index, key, value)


@torch.no_grad()
def read(
    model: Model,
    cache: KV,
    lengths: Tensor,
    tokens: Tensor,
    *,
    seen: Seen | None = None,
) -> Tensor:
    """Questions over a cache, none of which sees another: the last layer's output.

    Their keys and values go to the cache's last columns.

    Args:
        lengths: tokens of each row's context, [rows].
        tokens: [rows, prompts, columns].

    Returns:
        [rows, prompts, columns, hidden].
    """
    rows, prompts, columns = tokens.shape
    width = cache[0][0].shape[2] - prompts * columns
    x = model.embed_tokens(tokens.flatten(1))
    positions = (lengths[:, None] + torch.arange(columns)).repeat(1, prompts)
    turn = model.turn(positions, x.dtype)
    own = torch.kron(torch.eye(prompts), torch.ones(columns, columns).tril()).bool()
    visible = torch.cat(
        (
            (torch.arange(width) < lengths[:, None])[:, None].expand(-1, len(own), -1),
            own.expand(rows, -1, -1),
        ),
        dim=2,
    )
    for block, (keys, values) in zip(model.blocks(), cache, strict=True):
        query, key, value = block.self_attn.project(block.input_layernorm(x), turn)
        if seen is not None:
            seen.queries.append(query)
            seen.keys.append(key)
        keys[:, :, width:], values[:, :, width:] = key, value
        x = _behind_attention(block, x, query, keys, values, visible)
    output: Tensor = x.view(rows, prompts, columns, -1)
    return output


def _behind_attention(
    block: Block, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor
) -> Tensor:
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible[:, None])
    x = x + block.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
    output: Tensor = x + block.mlp(block.post_attention_layernorm(x))
    return output
