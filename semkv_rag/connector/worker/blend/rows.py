"""The rows of a blend: which of a request's tokens are of which kind.

* exact: their stored KV is right as it is; it is written at every layer, they are never computed;
* reused: stored behind another context; written or computed, as the selector picks;
* fresh: the text between chunks; always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semkv_rag.connector.messages import BlendTask
from semkv_rag.connector.worker.model.prompt_images import PromptImages
from semkv_rag.connector.worker.model.sliced_model import SlicedModel
from semkv_rag.reuse import Span


@dataclass(frozen=True, eq=False)
class BlendRows:
    """The tokens of a task from its start on; a row is such a token, counted from there.

    Attributes:
        start: the first row's position in the prompt.
        tokens: the prompt's, up to the plan's end.
        positions: of all rows, [rows], int64.
        blocks: the request's, [groups, blocks], int64.
        slots: where each row stands in the paged cache, [groups, rows], int64.
        spans: in prompt order, cut where the blend begins.
        candidates: the reused rows that are not exact, [candidates], int64.
        fresh: the rows that no span covers, [fresh], int64.
        images: what images bring, and where they have the tokens stand; None where there are none.
    """

    start: int
    tokens: Sequence[int]
    positions: Tensor
    blocks: Tensor
    slots: Tensor
    spans: list[Span]
    candidates: Tensor
    fresh: Tensor
    images: PromptImages | None = None

    @classmethod
    def of(cls, task: BlendTask, model: SlicedModel) -> BlendRows:
        """Those of a task, in its request's blocks."""
        start, paged, images = task.start, model.paged, model.images_of(task)
        positions = torch.arange(start, task.plan.covered, device=paged.device)
        blocks = torch.tensor(task.block_ids, device=paged.device)
        spans = [cut for span in task.plan.spans if (cut := _from(start, span)) is not None]
        reused = torch.zeros(len(positions), dtype=torch.bool, device=paged.device)
        exact = reused.clone()
        if images is not None:
            # Stored keys move to where the model has the tokens. Exact ones are there.
            spans = [
                one if one.exact else replace(one, base=one.base - images.offset(one.dst, one.end))
                for one in spans
            ]
        for span in spans:
            (exact if span.exact else reused)[span.dst - start : span.end - start] = True
        return cls(
            start,
            task.tokens,
            positions,
            blocks,
            paged.slots(blocks, positions),
            spans,
            torch.nonzero(reused).flatten(),
            torch.nonzero(~(reused | exact)).flatten(),
            images,
        )

    def of_span(self, span: Span) -> slice:
        """The rows of a span."""
        return slice(span.dst - self.start, span.end - self.start)

    def tokens_of(self, rows: Tensor) -> list[int]:
        """The tokens at some rows, [rows], int64."""
        return [self.tokens[position] for position in self.positions[rows].tolist()]

    @property
    def inexact(self) -> list[Span]:
        """The spans of the candidates."""
        return [span for span in self.spans if not span.exact]


def ranks(spans: Sequence[Span]) -> Tensor:
    """Which token of its span each token of `spans` is, [tokens], int64."""
    return torch.cat([torch.arange(span.length) for span in spans])


def _from(start: int, span: Span) -> Span | None:
    """The part of `span` from prompt position `start` on, or None when there is none."""
    cut = max(start - span.dst, 0)
    if cut >= span.length:
        return None
    return replace(span, src=span.src + cut, dst=span.dst + cut, length=span.length - cut)
