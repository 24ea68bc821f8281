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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semkv_rag.blend import squared_attention
from semkv_rag.connector.worker.blend.span_loader import SpanKV, SpanLoader
from semkv_rag.connector.worker.model.eager import EagerModel
from semkv_rag.reuse import Question, Span


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
    """Runs tokens that ask; `squares` and `kept` say what came of it.

    Args:
        blocks: the request's blocks, [blocks], int64; they hold the covered tokens.
        covered: how many these are.
        spans: that take stored KV, in prompt order, cut where the blend begins.
        loader: makes a loader of the spans' KV.
        pieces: cuts rows that are too many for one launch.
        keep: the layer whose stored KV is asked for afterwards, or None.

    Attributes:
        squares: [layers, candidates], float32: squared attention, the mean over this rank's heads. 0 in
            the first layer, which knows words and places only and is not looked at.
        kept: the spans' KV of layer `keep`, keys moved.
        rows: tokens that were run.
        waited_ms: the time that reading took.
    """

    def __init__(
        self,
        model: EagerModel,
        asking: Asking,
        *,
        blocks: Tensor,
        covered: int,
        spans: Sequence[Span],
        loader: Callable[[], SpanLoader],
        pieces: Callable[[Tensor], list[Tensor]],
        keep: int | None = None,
    ) -> None:
        self._model, self._asking, self._covered = model, asking, covered
        self._blocks, self._spans, self._make_loader = blocks, spans, loader
        self._keep = keep
        self._inexact = [index for index, span in enumerate(spans) if not span.exact]
        launches = pieces(torch.cat((asking.before, asking.positions)))
        self._launches = (
            launches if len(launches) == 1 else [*pieces(asking.before), asking.positions]
        )
        self.rows = len(asking.before) + len(asking.positions)
        self.squares = torch.zeros(
            len(model.layers), len(asking.columns), device=model.paged.device
        )
        self.kept: Sequence[SpanKV] = ()
        self.waited_ms = 0.0
        self._loader: SpanLoader | None = None
        self._stored: Sequence[SpanKV] = ()
        self._keys = torch.empty(0)  # of those that ask, in the layer under way

    def run(self) -> None:
        """Run it.

        Raises:
            ChunkFileError: a chunk's KV cannot be had.
        """
        paged = self._model.paged
        held = -(-self._covered // paged.block_size)
        missing = max(-(-len(self._asking.tokens) // paged.block_size) - held, 0)
        own_blocks = self._blocks[:held]
        caches = [layer.attention.kv_cache for layer in self._model.layers]
        with paged.borrowed(caches, own_blocks, missing) as behind:
            blocks = torch.cat((own_blocks, behind))
            for positions in self._launches[:-1]:
                with self._reading():
                    self._model.fill(self._tokens_at(positions), blocks, positions)
            with self._reading(), self._queries(), contextlib.suppress(_Asked):
                positions = self._launches[-1]
                handler = self._model.tap.handling(self._note_keys)
                with handler:
                    self._model.forward(self._tokens_at(positions), blocks, positions)
            self._restore(len(self._model.layers) - 1)

    def _tokens_at(self, positions: Tensor) -> list[int]:
        return [self._asking.tokens[position] for position in positions.tolist()]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have each layer find its stored KV in the cache."""
        self._loader = self._make_loader()
        try:
            with self._model.reaching(self._bring):
                yield
        finally:
            self._loader.close()
            self.waited_ms += self._loader.waited_ms

    def _bring(self, index: int) -> None:
        if index:
            self._restore(index - 1)
        assert self._loader is not None
        self._stored = self._loader.layer(index)
        for span, (keys, values) in zip(self._spans, self._stored, strict=True):
            self._write(index, span.dst, keys, values)
        if index == self._keep:
            self.kept = self._stored

    def _restore(self, index: int) -> None:
        """Write the stored KV of candidates that are part of the question once more."""
        if self._asking.overlap is None:
            return
        for span, (keys, values) in zip(self._spans, self._stored, strict=True):
            cut = max(self._asking.overlap - span.dst, 0)
            if cut < span.length:
                self._write(index, span.dst + cut, keys[cut:], values[cut:])

    def _write(self, index: int, position: int, keys: Tensor, values: Tensor) -> None:
        paged = self._model.paged
        positions = torch.arange(position, position + len(keys), device=paged.device)
        self._model.tap.write(index, keys, values, paged.slots(self._blocks, positions))

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
                    stored = [self._stored[span][0] for span in self._inexact]
                    squares = squared_attention(
                        query[-len(self._asking.positions) :],
                        torch.cat((*stored, self._keys)),
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
