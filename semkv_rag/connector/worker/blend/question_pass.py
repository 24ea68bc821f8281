"""The question's pass over a request's stored KV, to see which tokens it attends to.

The question and the fresh text are run through the model as though nothing were recomputed, each layer
as soon as its stored KV is in the cache. The attention weights are computed beside vLLM's attention, from
the queries that it is given. No other reused token is computed.

The question stands behind the plan's tokens, where the scheduler may not have given blocks yet: its KV
goes to borrowed blocks, which are put back. What stays in the cache is the stored KV of all layers, as a
blend behind it would have written it, and the KV of the fresh text.

A weight is the softmax over the tokens that can be picked and those of the question. The text between
chunks and the tokens in vLLM's prefix cache are left out, so that the choice does not depend on what
happened to be cached. In a layer with a sliding window, tokens outside of it get the weight 0. An
attention sink takes its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semkv_rag.blend import squared_attention
from semkv_rag.connector.worker.blend.launch import Launch
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.blend.stored_kv import Loading, StoredKV
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.model.slice import Watcher
from semkv_rag.reuse import Question


@dataclass(frozen=True, eq=False)
class Asking:
    """Whose attention is looked at, and what it can fall on.

    The keys are the candidates' stored ones, then those of the asking tokens themselves.

    Attributes:
        tokens: the prompt's, up to the last one that asks.
        before: positions of the text that is run with them, [tokens], int64, ascending, all before them.
        positions: of those that ask, [asking], int64, ascending.
        candidates: positions of what it can fall on, [candidates], int64, ascending.
        columns: each candidate's key, [candidates], int64.
        overlap: the first position at which both a candidate and a token that asks for good may stand:
            there stored KV is put back. None when it need not be.
    """

    tokens: Sequence[int]
    before: Tensor
    positions: Tensor
    candidates: Tensor
    columns: Tensor
    overlap: int | None = None

    def view(self, window: int | None) -> View:
        """What those that ask see in a layer.

        Args:
            window: the layer's, in tokens, or None.
        """
        asking = self.positions[:, None]
        # A candidate that asks has its key there, and its stored one is seen by nobody.
        stored = ~torch.isin(self.candidates, self.positions) & (self.candidates < asking)
        visible = torch.cat((stored, self.positions <= asking), dim=1)
        if window is not None:
            visible &= torch.cat((self.candidates, self.positions)) > asking - window
        first = _leading(~visible.any(0))
        return View(first, visible[:, first:], _leading(visible[:, first:].all(0)))


@dataclass(frozen=True, eq=False)
class View:
    """Which keys those that ask see in a layer.

    Attributes:
        first: the first key that any of them sees.
        visible: what each sees from there on, bool [asking, keys].
        open_keys: so many of these, the first ones, all of them see.
    """

    first: int
    visible: Tensor
    open_keys: int


def _leading(flags: Tensor) -> int:
    """How many of the first are true."""
    return int(flags.to(torch.int64).cumprod(0).sum())


def question_asks(
    question: Question, prompt: Sequence[int], candidates: Tensor, fresh: Tensor
) -> Asking:
    """A question and the fresh text before it.

    Args:
        prompt: the covered tokens.
        candidates: their positions, [candidates], int64, ascending.
        fresh: positions of the tokens that no span covers, [tokens], int64, ascending.
    """
    # What of the question stands before the candidates sees none of them.
    begin = max(question.position, int(candidates[0]))
    positions = torch.arange(begin, question.end, device=candidates.device)
    tokens = [*prompt[: question.position], *question.tokens]
    before, count = fresh[fresh < begin], len(candidates)
    columns = torch.where(
        torch.isin(candidates, positions),
        count + torch.searchsorted(positions, candidates),
        torch.arange(count, device=candidates.device),
    )
    return Asking(tokens, before, positions, candidates, columns, overlap=begin)


class QuestionPass(Watcher):
    """Watches tokens that ask; `squares` says what came of it.

    Args:
        rows: what is blended.
        stored: its KV; all of it is in the cache behind the pass.

    Attributes:
        squares: [layers of this rank, candidates], float32: squared attention, the mean over its heads.
            0 in the model's first layer, which knows words and places only and is not looked at.
    """

    asks = True

    def __init__(
        self, setting: BlendSetting, asking: Asking, rows: BlendRows, stored: StoredKV
    ) -> None:
        model, layouts = setting.model, setting.layouts
        self._model, self._asking, self._rows, self._stored = model, asking, rows, stored
        self._first_layer = model.ranks.first_layer
        self.squares = torch.zeros(
            len(model.layers), len(asking.columns), device=model.paged.device
        )
        paged, positions = model.paged, rows.positions
        self._candidates = ReadBack(paged, layouts, rows.blocks, positions[rows.candidates])
        written = positions[:0]  # by this pass, though their KV is stored
        if asking.overlap is not None:
            stored_rows = torch.ones(len(positions), dtype=torch.bool, device=positions.device)
            stored_rows[rows.fresh] = False
            written = positions[stored_rows & (positions >= asking.overlap)]
        self._written = ReadBack(paged, layouts, rows.blocks, written)
        self._overlapped: tuple[Tensor, Tensor] | None = None
        self._keys = torch.empty(0)  # of those that ask, in the layer under way
        windows = {layer.window for layer in model.layers}
        self._views = {window: asking.view(window) for window in windows}

    def launches(self, piece_tokens: int) -> Iterator[Launch]:
        """What is computed; those that ask in the last one.

        Args:
            piece_tokens: the most of one forward.
        """
        before, asking = self._asking.before, self._asking.positions
        size, blocks = self._model.paged.block_size, self._rows.blocks
        held = -(-len(self._rows.tokens) // size)
        missing = max(-(-len(self._asking.tokens) // size) - held, 0)
        launch = Launch(self._asking.tokens, blocks[:, :held], before)
        if len(before) + len(asking) > piece_tokens and len(before):
            yield replace(launch, watcher=Loading(self._stored))
            before = before[:0]
        together = torch.cat((before, asking))
        yield replace(launch, positions=together, watcher=self, whole=True, borrowed=missing)

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        if index:
            self._restore(index - 1)
        self._stored.wait(index)
        if len(self._written.positions):
            self._overlapped = self._written.both(index)
        own = slice(-len(self._asking.positions), None)
        self._keys = self._model.layers[index].attended(keys[own], values[own])

    def ask(self, index: int, queries: Tensor, attention: Any) -> None:
        if not self._first_layer + index:
            return
        layer = self._model.layers[index]
        stored = self._stored.keys(index)
        if layer.asks_values:
            stored = layer.attended(*self._candidates.both(index))
        elif stored is None:
            stored = self._candidates.keys(index)
        view = self._views[layer.window]
        squares = torch.zeros(len(stored) + len(self._keys), device=self.squares.device)
        squares[view.first :] = squared_attention(
            queries[-len(self._asking.positions) :],
            torch.cat((stored, self._keys))[view.first :],
            view.visible,
            scale=attention.scale,
            softcap=getattr(attention, "logits_soft_cap", None) or 0.0,
            sinks=layer.sinks,
            open_keys=view.open_keys,
        )
        self.squares[index] = squares[self._asking.columns]

    def end(self) -> None:
        self._restore(len(self._model.layers) - 1)

    def _restore(self, index: int) -> None:
        """Write the stored KV of tokens that are part of the question once more."""
        if self._overlapped is not None:
            paged, tokens = self._model.paged, self._written
            group = paged.group_of(self._model.layers[index].attention)
            slots = paged.slots(tokens.blocks[group], tokens.positions)
            self._model.tap.write(index, *self._overlapped, slots)
