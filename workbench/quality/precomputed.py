"""What is stored of a context's chunks, by what stood before them when they were computed.

* `alone`: nothing. The yardstick's documents have no head of their own.
* `left`: the chunk before it in its document, which itself saw nothing else; its KV is dropped.
* `similar`: the chunk of the prompt's documents with which it shares most names and values (FusionRAG,
  arXiv 2601.12904, section 4), the nearest among equals; its KV is dropped.
* `document`: all of its document that stands before it: an upper bound.

A chunk whose stored context is all that stands before it in the prompt is exact. The prompt's first chunk
is stored alone in every mode, and so exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.quality import words
from workbench.quality.batches import HIDDEN, Batch
from workbench.quality.network import Hook, Model
from workbench.quality.reuse import KV, prefill, whole

Mode = Literal["alone", "left", "similar", "document"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, eq=False)
class Stored:
    """What a blend finds.

    Attributes:
        kv: each layer's keys, moved to the prompt's positions, and values, [contexts, heads, split,
            head_dim].
        exact: [contexts, split], bool: what is right as it is.
        spans: [contexts, split]: the span that a token belongs to, -1 behind a context's end.
    """

    kv: KV
    exact: Tensor
    spans: Tensor

    def candidates(self, row: int) -> Tensor:
        """The reused, inexact tokens of a context, [candidates], int64."""
        return torch.nonzero((self.spans[row] >= 0) & ~self.exact[row]).flatten()

    def ranks(self, row: int) -> Tensor:
        """Which token of its span each candidate is, [candidates], int64."""
        spans = self.spans[row][self.candidates(row)]
        first = torch.searchsorted(spans, spans)
        return torch.arange(len(spans)) - first


@dataclass(frozen=True, eq=False)
class Fresh:
    """The full prefill of a batch's contexts.

    Attributes:
        states: each layer's input, [contexts, split, hidden].
        kv: as in `Stored`.
    """

    states: list[Tensor]
    kv: KV


@torch.no_grad()
def fresh(model: Model, batch: Batch) -> Fresh:
    """Everything as one."""
    states: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for layer in model.layers
    ]
    try:
        _, kv = prefill(model, batch, whole(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return Fresh(states, kv)


@torch.no_grad()
def precompute(model: Model, batch: Batch, mode: Mode) -> Stored:
    """What offline precompute leaves of each context's chunks."""
    if mode == "document":
        _, kv = prefill(model, batch, batch.documents)
        return Stored(kv, batch.documents == 0, batch.documents)
    chunks = _chunks(batch)
    before = [_before(batch, mode, row, at) for row, at in chunks]
    exact = torch.zeros(batch.chunks.shape, dtype=torch.bool)
    for (row, at), context in zip(chunks, before, strict=True):
        exact[row, at] = at[0] == len(context) and bool(
            (context == torch.arange(len(context))).all()
        )
    return Stored(_behind(model, batch, chunks, before), exact, batch.chunks)


def _chunks(batch: Batch) -> list[tuple[int, Tensor]]:
    """Every chunk: its context, and its columns there."""
    return [
        (row, torch.nonzero(chunks == chunk).flatten())
        for row, chunks in enumerate(batch.chunks)
        for chunk in range(int(chunks.max()) + 1)
    ]


def _before(batch: Batch, mode: Mode, row: int, at: Tensor) -> Tensor:
    """The columns of the chunk that stood before chunk `at` when it was computed."""
    chunks, own = batch.chunks[row], int(batch.chunks[row, at[0]])
    nothing = at[:0]
    if own == 0 or mode == "alone":
        return nothing
    if mode == "left":
        same = batch.documents[row, at[0]] == batch.documents[row, at[0] - 1]
        return torch.nonzero(chunks == own - 1).flatten() if same else nothing
    mine = _telling(batch, row, at)
    others = {
        chunk: torch.nonzero(chunks == chunk).flatten()
        for chunk in range(int(chunks.max()) + 1)
        if chunk != own
    }
    return max(
        others.items(),
        key=lambda other: (len(mine & _telling(batch, row, other[1])), -abs(other[0] - own)),
    )[1]


def _telling(batch: Batch, row: int, at: Tensor) -> set[int]:
    """The names and values of a chunk."""
    return {token for token in batch.tokens[row, at].tolist() if token >= words.VALUES[0]}


def _behind(
    model: Model, batch: Batch, chunks: list[tuple[int, Tensor]], before: list[Tensor]
) -> KV:
    """The KV of every chunk, computed behind the chunk `before` it, where it stands in the prompt."""
    width = max(len(c) + len(at) for c, (_, at) in zip(before, chunks, strict=True))
    tokens = torch.full((len(chunks), width), words.PAD)
    positions = torch.zeros(len(chunks), width, dtype=torch.int64)
    for index, ((row, at), context) in enumerate(zip(chunks, before, strict=True)):
        both = torch.cat((context, at))
        tokens[index, : len(both)] = batch.tokens[row, both]
        positions[index] = torch.arange(width) + at[0] - len(context)
    kept: KV = []

    def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((key, value))
        return key, value

    hooks: list[Hook | None] = [keep] * len(model.layers)
    causal = torch.full((1, 1, width, width), HIDDEN).triu(1)
    model.states(tokens, positions, (causal, causal[:, :, :0]), hooks)
    rows = torch.cat([torch.full((len(at),), row) for row, at in chunks])
    columns = torch.cat([at for _, at in chunks])
    sources = torch.cat([torch.full((len(at),), i) for i, (_, at) in enumerate(chunks)])
    places = torch.cat(
        [torch.arange(len(at)) + len(c) for c, (_, at) in zip(before, chunks, strict=True)]
    )

    def placed(each: Tensor) -> Tensor:
        whole_ = each.new_zeros(len(batch.lengths), each.shape[1], batch.split, each.shape[3])
        whole_[rows, :, columns] = each[sources, :, places]
        return whole_

    return [(placed(key), placed(value)) for key, value in kept]
