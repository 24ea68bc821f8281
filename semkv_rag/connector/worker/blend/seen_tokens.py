"""What a blend did with each token, for whoever asked to see it."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.connector.messages import SeenTokens
from semkv_rag.connector.worker.blend.rows import BlendRows

GRADES = 10


def seen_tokens(rows: BlendRows, picked: Tensor, scores: Tensor | None) -> SeenTokens:
    """Which tokens a blend computed again, and how much the selector wanted each.

    Args:
        picked: the rows that were computed again, [picked], int64.
        scores: of all candidates, [candidates]; None where nothing was looked at.
    """
    positions = (picked.cpu().sort().values + rows.start).tolist()
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    grades = [" "] * len(rows.positions)
    if scores is not None and len(scores):
        ranks = torch.empty(len(scores), dtype=torch.int64)
        ranks[scores.cpu().argsort(stable=True)] = torch.arange(len(scores))
        for row, rank in zip(rows.candidates.tolist(), ranks.tolist(), strict=True):
            grades[row] = str(rank * GRADES // len(scores))
    return SeenTokens(tuple(runs), rows.start, "".join(grades))
