"""One pass of a request's question over its stored KV, to see which of its tokens it attends to.

The question and the fresh text are run through the model as though nothing were recomputed: hooks before
each decoder layer write the stored KV that its attention will read, and the attention weights are
computed beside vLLM's attention, from the queries that it is given. No reused token is computed.

The question stands behind the plan's tokens, where the scheduler may not have given blocks yet: its KV
goes to borrowed blocks, which are put back. What stays in the cache is the stored KV of all layers, as a
blend behind it would have written it, and the KV of the fresh text.

A weight is the softmax over the tokens that can be picked and the question's own: what else there is,
the text between chunks and whatever vLLM's prefix cache holds, is left out, so that the choice does not
depend on what happened to be cached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semkv_rag.blend import Pooling, question_attention
from semkv_rag.engine.eager import EagerModel
from semkv_rag.engine.span_loader import SpanKV, SpanLoader
from semkv_rag.reuse import Question, Span


class _Asked(Exception):
    """Stops a forward: the last layer's queries are known."""


class QuestionPass:
    """Runs one question; `attention` and `kept` say what came of it.

    Args:
        tokens: the prompt's covered ones.
        blocks: the request's blocks, [blocks], int64; they hold the covered tokens.
        spans: that take stored KV, in prompt order, cut where the blend begins.
        fresh: positions of the tokens that no span covers, [tokens], int64, ascending.
        loader: makes a loader of the spans' KV.
        pieces: cuts rows that are too many for one launch.
        keep: the layer whose stored KV is asked for afterwards, or None.

    Attributes:
        attention: [layers, tokens], float32: of the inexact spans' tokens, from this rank's heads.
        kept: the spans' KV of layer `keep`, keys moved.
        rows: tokens that were run.
        waited_ms: the time that reading took.
    """

    def __init__(
        self,
        model: EagerModel,
        *,
        tokens: Sequence[int],
        blocks: Tensor,
        question: Question,
        spans: Sequence[Span],
        fresh: Tensor,
        loader: Callable[[], SpanLoader],
        pieces: Callable[[Tensor], list[Tensor]],
        pooling: Pooling,
        keep: int | None,
    ) -> None:
        self._model, self._tokens, self._question = model, tokens, question
        self._blocks, self._spans, self._make_loader = blocks, spans, loader
        self._pooling, self._keep = pooling, keep
        self._inexact = [index for index, span in enumerate(spans) if not span.exact]
        first = spans[self._inexact[0]].dst
        # What of the question stands before the candidates sees none of them.
        device = model.paged.device
        self._asking = torch.arange(max(question.position, first), question.end, device=device)
        before = fresh[fresh < self._asking[0]]
        launches = pieces(torch.cat((before, self._asking)))
        self._launches = launches if len(launches) == 1 else [*pieces(before), self._asking]
        self._columns, self._visible = self._layout()
        self.rows = len(before) + len(self._asking)
        self.attention = torch.zeros(len(model.layers), len(self._columns), device=device)
        self.kept: Sequence[SpanKV] = ()
        self.waited_ms = 0.0
        self._loader: SpanLoader | None = None
        self._stored: Sequence[SpanKV] = ()
        self._keys = torch.empty(0)  # of the question, in the layer under way

    def run(self) -> None:
        """Run it.

        Raises:
            ChunkFileError: a chunk's KV cannot be had.
        """
        paged, own = self._model.paged, len(self._tokens)
        held = -(-own // paged.block_size)
        missing = max(-(-self._question.end // paged.block_size) - held, 0)
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
        question = self._question
        return [
            self._tokens[position]
            if position < question.position
            else question.tokens[position - question.position]
            for position in positions.tolist()
        ]

    def _layout(self) -> tuple[Tensor, Tensor]:
        """Where candidates stand among the keys, and which keys each question token sees.

        Keys are the candidates' stored ones, then the question's own. A candidate that is part of the
        question has its key there, and its stored one is seen by nobody.

        Returns:
            [candidates] int64, and bool [question, keys].
        """
        device, asking = self._asking.device, self._asking
        spans = [self._spans[index] for index in self._inexact]
        candidates = torch.cat([torch.arange(s.dst, s.end, device=device) for s in spans])
        own = torch.arange(len(candidates), device=device)
        within = candidates >= asking[0]
        columns = torch.where(within, len(candidates) + candidates - asking[0], own)
        visible = torch.cat(
            (
                (~within).expand(len(asking), -1),
                asking[None, :] <= asking[:, None],
            ),
            dim=1,
        )
        return columns, visible

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have each layer find its stored KV in the cache."""
        self._loader = self._make_loader()
        hooks = [
            layer.decoder.register_forward_pre_hook(self._before(index))
            for index, layer in enumerate(self._model.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._loader.close()
            self.waited_ms += self._loader.waited_ms

    def _before(self, index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any) -> None:
            if index:
                self._restore(index - 1)
            assert self._loader is not None
            self._stored = self._loader.layer(index)
            for span, (keys, values) in zip(self._spans, self._stored, strict=True):
                self._write(index, span.dst, keys, values)
            if index == self._keep:
                self.kept = self._stored

        return hook

    def _restore(self, index: int) -> None:
        """Write the stored KV of candidates that are part of the question once more."""
        begin = int(self._asking[0])
        for span, (keys, values) in zip(self._spans, self._stored, strict=True):
            cut = max(begin - span.dst, 0)
            if cut < span.length:
                self._write(index, span.dst + cut, keys[cut:], values[cut:])

    def _write(self, index: int, position: int, keys: Tensor, values: Tensor) -> None:
        paged = self._model.paged
        positions = torch.arange(position, position + len(keys), device=paged.device)
        self._model.tap.write(index, keys, values, paged.slots(self._blocks, positions))

    def _note_keys(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self._keys = self._model.as_heads(index, keys, values)[0][-len(self._asking) :]

    def _queries(self) -> contextlib.ExitStack:
        """Have `_see` look at the queries of each layer's attention."""
        stack = contextlib.ExitStack()
        for index, layer in enumerate(self._model.layers):
            stack.enter_context(_replaced(layer.attention.impl, self._see(index)))
        return stack

    def _see(self, index: int) -> Callable[[Any, Callable[..., Tensor]], Callable[..., Tensor]]:
        def wrap(impl: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def seeing(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                stored = [self._stored[span][0] for span in self._inexact]
                weights = question_attention(
                    query[-len(self._asking) :],
                    torch.cat((*stored, self._keys)),
                    self._visible,
                    scale=impl.scale,
                    softcap=getattr(impl, "logits_soft_cap", None) or 0.0,
                    pooling=self._pooling,
                )
                self.attention[index] = weights[self._columns]
                if index == len(self._model.layers) - 1:
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
