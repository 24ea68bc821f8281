"""Attention over scattered rows, as blends run it, against a dense reference."""

from __future__ import annotations

from typing import Any

import torch

from semkv_rag.connector.worker.attention_check import attention_error, scattered
from semkv_rag.connector.worker.blend.setting import BlendSetting

LEAST_TOKENS = 1024
TOKENS_PER_RUN = 4


def probe_attention(
    setting: BlendSetting, *, runs: int, limit: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Check the first and the last layer, and one of each further window.

    Args:
        runs: how many runs of neighbouring rows.
        limit: the most tokens of a request.
        dtype: the model's.

    Returns:
        `largest_error` of a row's output, relative; `rows`; `tokens` of the request; `ms` for all rows.
    """
    tokens = min(limit, max(LEAST_TOKENS, TOKENS_PER_RUN * runs))
    if tokens < 2 * runs:
        return {
            "left_out": f"{runs:,} runs need {2 * runs:,} tokens, a request has {limit:,} at most"
        }
    generator = torch.Generator().manual_seed(runs)
    positions, behind = scattered(tokens, runs, generator)
    layers = setting.model.layers
    of_each_window = {layer.window: index for index, layer in enumerate(layers)}
    largest, took = 0.0, 0.0
    for index in sorted({0, len(layers) - 1, *of_each_window.values()}):
        try:
            error, seconds = attention_error(
                setting, index, positions, behind, tokens, dtype, generator
            )
        except NotImplementedError as reason:
            return {"left_out": str(reason)}
        largest, took = max(largest, error), max(took, seconds)
    return {
        "rows": len(positions),
        "tokens": tokens,
        "largest_error": largest,
        "ms": took * 1000,
    }
