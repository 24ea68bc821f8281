"""The `none` selector: stored KV as it is, two independent ways.

A reused token knows its own chunk and the context it was stored behind, nothing else of the prompt;
a token outside the spans knows everything before it. With relative positions (RoPE) it makes no
difference whether a chunk is computed elsewhere and moved, or in place behind a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from semkv_rag.reuse.plan import ReusePlan
from tests.reference.plain import PlainModel, causal
from tests.reference.stored import StoredKV, StoringModel


def masked(
    model: PlainModel, prompt: Sequence[int], plan: ReusePlan, stored: Mapping[str, StoredKV]
) -> Tensor:
    """The next token's logprobs, [vocabulary], from one pass under a block-diagonal mask.

    What stood to the left of a span when its KV was computed (the stored context, and the chunk
    tokens that are cut off) is put beside the prompt as further rows, which only this span's tokens
    see. Of `stored`, only the tokens are used.
    """
    tokens: list[int] = []
    positions: list[int] = []
    span_of: list[int] = []  # the row's span, -1 outside
    for index, span in enumerate(plan.spans):
        chunk = stored[span.chunk_id]
        left = [*chunk.context, *chunk.tokens[: span.src]]
        tokens += left
        positions += range(span.dst - len(left), span.dst)
        span_of += [index] * len(left)
    beside = len(tokens)
    tokens += prompt
    positions += range(len(prompt))
    span_of += [-1] * len(prompt)
    for index, span in enumerate(plan.spans):
        span_of[beside + span.dst : beside + span.end] = [index] * span.length

    place, owner = torch.tensor(positions), torch.tensor(span_of)
    in_prompt = torch.arange(len(tokens)) >= beside
    outside = owner == -1
    same_span = owner[:, None] == owner[None, :]
    visible = torch.where(outside[:, None], in_prompt[None, :], same_span) & causal(place, place)
    # A long context may begin left of position 0: all move right together, which RoPE cannot tell.
    return model.forward(tokens, place - place.min(), visible)[-1]


def piece_by_piece(
    model: StoringModel, prompt: Sequence[int], plan: ReusePlan, stored: Mapping[str, StoredKV]
) -> Tensor:
    """The next token's logprobs, [vocabulary], from a cache filled from left to right.

    A span's moved KV is appended to the cache; text between spans is run against what is there.
    """
    cache = DynamicCache()
    logprobs = torch.empty(0)
    done = 0

    def compute_up_to(end: int) -> None:
        nonlocal logprobs
        if end > done:
            queries = torch.arange(done, end)
            keys = torch.arange(end)
            visible = causal(queries, keys)
            logprobs = model.forward(prompt[done:end], queries, visible, cache, keys)[-1]

    for span in plan.spans:
        compute_up_to(span.dst)
        rows = slice(span.src, span.src + span.length)
        for layer, (keys, values) in enumerate(
            model.moved(stored[span.chunk_id], span.dst - span.src)
        ):
            one, other = model.turned(keys[rows], values[rows])
            cache.update(one[None], other[None], layer)
        done = span.end
    compute_up_to(len(prompt))
    return logprobs
