"""The question's pass over a request's stored KV, to see which tokens it attends to.

The question and the fresh text are run through the model as though nothing were
recomputed. Hooks before each decoder layer write the stored KV that its attention will read, and the
attention weights are computed beside vLLM's attention, from the queries that it is given. No other
reused token is computed.

The question stands behind the plan's tokens, where the scheduler may not have given blocks yet: its KV
goes to borrowed blocks, which are put back. What stays in the cache is the stored KV of all layers, as a
blend behind it would have written it, and the KV of the fresh text.

A weight is the softmax over the tokens that can be picked and those that ask: what else there is,
the text between chunks and whatever vLLM's prefix cache holds, is left out, so that the choice does not
depend on what happened to be cached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semkv_rag.blend import squared_attention
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.blend.stored_kv import StoredKV
from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.eager import EagerModel
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.reuse import Question


class _Asked(Exception):
    """Stops a forward: the last layer's queries are known."""


@dataclass(frozen=True, eq=False)
class Asking:
    """Whose attention is looked at, and what it can fall on.

    The keys are the candidates' stored ones, then those of the asking tokens themselves.

    Attributes:
        tokens: the prompt's, up to the last one that asks.
        before: positions of the text that is run with them, [tokens], int64, ascending, all before them.
        positions: of those that ask, [asking], int64, ascending.
        columns: each candidate's key, [candidates], int64.
        visible: what each asking token sees, bool [asking, candidates + asking].
        overlap: the first position at which both a candidate and a token that asks for good may stand:
            there stored KV is put back. None when it need not be.
    """

    tokens: Sequence[int]
    before: Tensor
    positions: Tensor
    columns: Tensor
    visible: Tensor
    overlap: int | None = None


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
    return Asking(
        tokens, fresh[fresh < begin], positions, *_view(positions, candidates), overlap=begin
    )


def _view(positions: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """`Asking.columns` and `Asking.visible`.

    A candidate that asks has its key there, and its stored one is seen by nobody.
    """
    count, within = len(candidates), torch.isin(candidates, positions)
    columns = torch.where(
        within,
        count + torch.searchsorted(positions, candidates),
        torch.arange(count, device=candidates.device),
    )
    stored = ~within & (candidates < positions[:, None])
    return columns, torch.cat((stored, positions <= positions[:, None]), dim=1)


class QuestionPass:
    """Runs tokens that ask; `squares` says what came of it.

    Args:
        rows: what is blended.
        stored: its KV; all of it is in the cache behind the pass.
        layouts: of each layer's blocks.
        taken: the blocks that are not to be borrowed, the request's own aside.
        piece_tokens: the most of one launch.

    Attributes:
        squares: [layers, candidates], float32: squared attention, the mean over this rank's heads. 0 in
            the first layer, which knows words and places only and is not looked at.
        length: tokens that are run.
    """

    def __init__(
        self,
        model: EagerModel,
        asking: Asking,
        rows: BlendRows,
        stored: StoredKV,
        layouts: Sequence[BlockLayout],
        *,
        taken: Iterable[int],
        piece_tokens: int,
    ) -> None:
        self._model, self._asking, self._rows, self._stored = model, asking, rows, stored
        self._taken, self._piece_tokens = taken, piece_tokens
        self.length = len(asking.before) + len(asking.positions)
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

    def run(self) -> None:
        """Run it.

        Raises:
            LostKV: a chunk's KV cannot be had.
        """
        paged, blocks = self._model.paged, self._rows.blocks
        held = -(-len(self._rows.tokens) // paged.block_size)
        missing = max(-(-len(self._asking.tokens) // paged.block_size) - held, 0)
        caches = [layer.attention.kv_cache for layer in self._model.layers]
        with paged.borrowed(caches, {*blocks.tolist(), *self._taken}, missing) as behind:
            blocks = torch.cat((blocks[:held], behind))
            *before, asking = self._launches()
            for positions in before:
                with self._model.reaching(self._stored.wait):
                    self._model.fill(self._tokens_at(positions), blocks, positions)
            with (
                self._model.reaching(self._reach),
                self._queries(),
                self._model.tap.handling(self._note_keys),
                contextlib.suppress(_Asked),
            ):
                self._model.forward(self._tokens_at(asking), blocks, asking)
            self._restore(len(self._model.layers) - 1)

    def _launches(self) -> list[Tensor]:
        """Positions, launch by launch; those that ask in the last one."""
        before, asking = self._asking.before, self._asking.positions
        if self.length <= self._piece_tokens:
            return [torch.cat((before, asking))]
        pieces = -(-len(before) // self._piece_tokens)
        return [*(before.tensor_split(pieces) if pieces else ()), asking]

    def _tokens_at(self, positions: Tensor) -> list[int]:
        return [self._asking.tokens[position] for position in positions.tolist()]

    def _reach(self, index: int) -> None:
        if index:
            self._restore(index - 1)
        self._stored.wait(index)
        if len(self._written.positions):
            self._overlapped = self._written.both(index)

    def _restore(self, index: int) -> None:
        """Write the stored KV of tokens that are part of the question once more."""
        if self._overlapped is not None:
            paged, tokens = self._model.paged, self._written
            slots = paged.slots(tokens.blocks, tokens.positions)
            self._model.tap.write(index, *self._overlapped, slots)

    def _note_keys(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self._keys = self._model.as_heads(index, keys, values)[0][-len(self._asking.positions) :]

    def _queries(self) -> contextlib.ExitStack:
        """Have `_watching` look at the queries of each layer's attention."""
        stack = contextlib.ExitStack()
        for index, layer in enumerate(self._model.layers):
            stack.enter_context(_replaced(layer.attention.impl, self._watching(index)))
        return stack

    def _watching(
        self, index: int
    ) -> Callable[[Any, Callable[..., Tensor]], Callable[..., Tensor]]:
        def wrap(impl: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
            last = len(self._model.layers) - 1

            def seeing(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if index:
                    stored = self._stored.keys(index)
                    if stored is None:
                        stored = self._candidates.keys(index)
                    squares = squared_attention(
                        query[-len(self._asking.positions) :],
                        torch.cat((stored, self._keys)),
                        self._asking.visible,
                        scale=impl.scale,
                        softcap=getattr(impl, "logits_soft_cap", None) or 0.0,
                    )
                    self.squares[index] = squares[self._asking.columns]
                if index == last:
                    raise _Asked
                return forward(layer, query, *args, **kwargs)

            return seeing

        return wrap


@contextlib.contextmanager
def _replaced(
    impl: Any, wrap: Callable[[Any, Callable[..., Tensor]], Callable[..., Tensor]]
) -> Iterator[None]:
    """An attention implementation whose `forward` is wrapped."""
    impl.forward = wrap(impl, impl.forward)
    try:
        yield
    finally:
        del impl.forward  # the class's own is back
