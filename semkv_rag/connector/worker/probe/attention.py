"""Attention over scattered rows, as blends run it, against a dense reference.

The rows stand in runs all over a request whose KV is random. Each row's own key is like its query, and so
is the key right behind each run: a mask that ends one token too early or too late shows at once. The
reference is computed from what the paged cache holds.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.model.runs import longest_part
from semkv_rag.connector.worker.model.scattered import MOST_RUNS
from semkv_rag.connector.worker.model.slice import Slice

LEAST_TOKENS = 1024
TOKENS_PER_RUN = 4
LIKE_QUERY = 3.0
"""How much of a key is its query."""
ROWS = 64
"""Of the reference at a time."""


@torch.inference_mode()
def probe_attention(
    setting: BlendSetting, *, runs: int, limit: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Check the first and the last layer.

    Args:
        runs: how many runs of neighbouring rows.
        limit: the most tokens of a request.
        dtype: the model's.

    Returns:
        `largest_error` of a row's output, relative; `rows`; `tokens` of the request; `ms` for all rows.
    """
    model, paged = setting.model, setting.model.paged
    tokens = min(limit, max(LEAST_TOKENS, TOKENS_PER_RUN * runs))
    if tokens < 2 * runs:
        return {
            "left_out": f"{runs:,} runs need {2 * runs:,} tokens, a request has {limit:,} at most"
        }
    generator = torch.Generator().manual_seed(runs)
    positions, behind = scattered(tokens, runs, generator)
    count = -(-tokens // paged.block_size)
    blocks = 1 + torch.randperm(count, generator=generator).to(paged.device)
    largest, took = 0.0, 0.0
    for index in sorted({0, len(model.layers) - 1}):
        error, seconds = _layer(setting, index, positions, behind, blocks, tokens, dtype, generator)
        largest, took = max(largest, error), max(took, seconds)
    return {
        "rows": len(positions),
        "tokens": tokens,
        "largest_error": largest,
        "ms": took * 1000,
    }


def scattered(tokens: int, runs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in so many runs of one to three, [rows] ascending, and those right behind runs."""
    stride = tokens // runs
    lengths = 1 + torch.randint(min(3, stride - 1), (runs,), generator=generator)
    room = stride - lengths  # one at least stays free behind each run
    starts = (torch.rand(runs, generator=generator) * room).long() + stride * torch.arange(runs)
    offsets = torch.arange(int(lengths.max()))
    inside = offsets < lengths[:, None]
    return (starts[:, None] + offsets)[inside], starts + lengths


def _layer(
    setting: BlendSetting,
    index: int,
    positions: Tensor,
    behind: Tensor,
    blocks: Tensor,
    tokens: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[float, float]:
    """The largest error of a layer's rows, and how long its attention takes, in seconds."""
    model, paged = setting.model, setting.model.paged
    layer = model.layers[index]
    (kv_heads, head_dim), (_, value_dim) = layer.kv_shapes
    heads = int(layer.attention.num_heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    queries = random(len(positions), heads, head_dim)
    alike = LIKE_QUERY * queries.view(len(positions), kv_heads, -1, head_dim).mean(2)
    keys, values = random(tokens, kv_heads, head_dim), random(tokens, kv_heads, value_dim)
    last = torch.searchsorted(positions, behind) - 1  # the row in front of each
    keys[behind] = alike[last]
    every = torch.arange(tokens, device=paged.device)

    def placed(one: Tensor) -> Tensor:
        return one.to(paged.device, dtype)

    model.tap.write(index, placed(keys), placed(values), paged.slots(blocks, every))
    fresh = alike + random(*alike.shape) / 4, random(len(positions), kv_heads, value_dim)
    given = [placed(one.flatten(1)) for one in (queries, *fresh)]

    def attend() -> Tensor:
        """In as many forwards as a blend would take."""
        parts, begin = [], 0
        while begin < len(positions):
            rest = positions[begin:]
            rows = slice(begin, begin + longest_part(rest, len(rest), MOST_RUNS))
            here = positions[rows].to(paged.device)
            # The layer is given what the model would have made of the tokens.
            metadata, slots = model.attention.metadata([Slice([], blocks, here)])
            context = set_forward_context(
                metadata, model.config, num_tokens=len(here), slot_mapping=slots, skip_compiled=True
            )
            with model.attention.computing(), context:
                parts.append(layer.attention(*(one[rows] for one in given)))
            begin = rows.stop
        return torch.cat(parts).float().cpu()

    output = attend()
    begin = time.perf_counter()
    attend()
    took = time.perf_counter() - begin
    held = ReadBack(paged, setting.layouts, blocks, every).both(index)
    held_keys, held_values = (one.float().cpu() for one in held)
    expected = dense(queries.to(dtype), held_keys, held_values, positions, layer.attention)
    off = (output.view_as(expected) - expected).flatten(1).norm(dim=1)
    return float((off / expected.flatten(1).norm(dim=1)).max()), took


def dense(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, attention: Any
) -> Tensor:
    """What attention gives each row, in float32, [rows, heads, value_dim].

    Args:
        queries: [rows, heads, head_dim].
        keys, values: of the whole request, [tokens, kv_heads, ...].
        positions: of the rows, [rows].
        attention: vLLM's module, for its scale, its cap of logits and its sinks.
    """
    impl = attention.impl
    group = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    cap = getattr(impl, "logits_soft_cap", None) or 0.0
    sinks = getattr(impl, "sinks", None)
    places = torch.arange(len(keys))
    parts = []
    for begin in range(0, len(queries), ROWS):
        rows = slice(begin, begin + ROWS)
        logits = torch.einsum("rhd,thd->hrt", queries[rows].float() * impl.scale, keys)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        logits.masked_fill_(places > positions[rows, None], -torch.inf)
        if sinks is not None:
            sink = sinks.float().cpu()[:, None, None].expand(-1, logits.shape[1], 1)
            logits = torch.cat((logits, sink), dim=-1)
        weights = logits.softmax(-1)[..., : len(keys)]
        parts.append(torch.einsum("hrt,thd->rhd", weights, values))
    return torch.cat(parts)
