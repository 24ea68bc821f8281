"""A layer's attention over scattered rows, as blends run it, against a dense reference.

The rows stand in runs all over a request whose KV is random. Keys that are like a row's query stand at
its own position and where its mask has its ends: right behind its run, and in a layer with a window at
the last token that it sees and the first one that it does not. A mask that ends one token too early or
too late shows at once. The reference is computed from what the paged cache holds.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.model.runs import longest_part
from semkv_rag.connector.worker.model.scattered import MOST_RUNS
from semkv_rag.connector.worker.model.slice import Slice

LIKE_QUERY = 3.0
"""How much of a key is its query."""
ROWS = 64
"""Rows of the reference that are computed at a time."""


def scattered(tokens: int, runs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in so many runs of one to three, [rows] ascending, and those right behind runs."""
    stride = tokens // runs
    lengths = 1 + torch.randint(min(3, stride - 1), (runs,), generator=generator)
    room = stride - lengths  # one at least stays free behind each run
    starts = (torch.rand(runs, generator=generator) * room).long() + stride * torch.arange(runs)
    offsets = torch.arange(int(lengths.max()))
    inside = offsets < lengths[:, None]
    return (starts[:, None] + offsets)[inside], starts + lengths


@torch.inference_mode()
def attention_error(
    setting: BlendSetting,
    index: int,
    positions: Tensor,
    behind: Tensor,
    tokens: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[float, float]:
    """The largest relative error of a row's output, and how long the rows' attention takes, in seconds.

    Writes over the first blocks of the paged cache.

    Args:
        index: of the layer.
        positions: of the rows, [rows], int64, ascending.
        behind: positions right behind runs, [runs], int64.
        tokens: of the request.
        dtype: the model's.

    Raises:
        NotImplementedError: there is nothing to compare with.
    """
    model, paged = setting.model, setting.model.paged
    count = -(-tokens // paged.block_size)
    layer = model.layers[index]
    # Only this layer is computed: the same blocks do for all groups.
    blocks = 1 + torch.randperm(count, generator=generator).to(paged.device)
    blocks = blocks.expand(paged.groups, -1)
    (kv_heads, head_dim), (_, value_dim) = layer.kv_shapes
    heads = int(layer.attention.num_heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    queries = random(len(positions), heads, layer.query_dim)
    alike = LIKE_QUERY * layer.alike(queries)
    keys, values = random(tokens, kv_heads, head_dim), random(tokens, kv_heads, value_dim)
    if layer.window is not None:
        for outermost in (positions - layer.window + 1, positions - layer.window):
            keys[outermost[outermost >= 0]] = alike[outermost >= 0]
    last = torch.searchsorted(positions, behind) - 1  # the row in front of each
    keys[behind] = alike[last]
    every = torch.arange(tokens, device=paged.device)

    def placed(one: Tensor) -> Tensor:
        return one.to(paged.device, dtype)

    model.tap.write(index, placed(keys), placed(values), paged.slots(blocks[0], every))
    fresh = alike + random(*alike.shape) / 4, random(len(positions), kv_heads, value_dim)
    given = [placed(one) for one in (queries, *fresh)]

    def attend() -> Tensor:
        """vLLM's attention, in as many forwards as a blend would take."""
        parts, begin = [], 0
        while begin < len(positions):
            rest = positions[begin:]
            most = MOST_RUNS if layer.by_token else len(rest)
            rows = slice(begin, begin + longest_part(rest, most, MOST_RUNS))
            here = positions[rows].to(paged.device)
            # The layer is given what the model would have made of the tokens.
            metadata, slots = model.attention.metadata([Slice([], blocks, here)])
            context = set_forward_context(
                metadata, model.config, num_tokens=len(here), slot_mapping=slots, skip_compiled=True
            )
            with model.attention.computing(), context:
                asked, *written = (one[rows] for one in given)
                parts.append(layer.attend(asked, *written))
            begin = rows.stop
        return torch.cat(parts).float().cpu()

    output = attend()
    begin = time.perf_counter()
    attend()
    took = time.perf_counter() - begin
    held = layer.of_heads(*ReadBack(paged, setting.layouts, blocks, every).both(index))
    held_keys, held_values = (one.float().cpu() for one in held)
    expected = dense(queries.to(dtype), held_keys, held_values, positions, layer)
    off = (output.view_as(expected) - expected).flatten(1).norm(dim=1)
    return float((off / expected.flatten(1).norm(dim=1)).max()), took


def dense(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, layer: Layer) -> Tensor:
    """What attention gives each row, in float32, [rows, heads, value_dim].

    Args:
        queries: [rows, heads, head_dim].
        keys, values: of the whole request, [tokens, kv_heads, ...].
        positions: of the rows, [rows].
        layer: whose scale, cap of logits, sinks and window count.
    """
    impl, kv_heads = layer.attention.impl, keys.shape[1]
    cap = getattr(impl, "logits_soft_cap", None) or 0.0
    places = torch.arange(len(keys))
    parts = []
    for begin in range(0, len(queries), ROWS):
        rows = slice(begin, begin + ROWS)
        asked = (queries[rows].float() * impl.scale).unflatten(1, (kv_heads, -1))
        logits = torch.einsum("rkgd,tkd->kgrt", asked, keys)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        distance = positions[rows, None] - places
        hidden = distance < 0
        if layer.window is not None:
            hidden |= distance >= layer.window
        logits.masked_fill_(hidden, -torch.inf)
        if layer.sinks is not None:
            sink = layer.sinks.float().cpu().view(kv_heads, -1, 1, 1)
            logits = torch.cat((logits, sink.expand(*logits.shape[:3], 1)), dim=-1)
        weights = logits.softmax(-1)[..., : len(keys)]
        parts.append(torch.einsum("kgrt,tkd->rkgd", weights, values).flatten(1, 2))
    return torch.cat(parts)
