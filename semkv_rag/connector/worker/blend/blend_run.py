"""One blend: which of a request's tokens are computed, and in which layers.

The tokens are of three kinds:

* exact: their stored KV is right as it is; it is written at every layer, they are never computed;
* reused: stored behind another context; written or computed, as the selector picks (CacheBlend,
  arXiv 2405.16444);
* fresh: the text between chunks; always computed.

The model itself is called, eagerly, on the tokens that are computed. Hooks before each decoder layer
write the stored KV that this layer's attention will read, and at the check layer cut the tokens that
go on to the picked ones: every argument that has the token axis loses the same rows. So nothing is
written per architecture. The layers up to the check layer see all tokens that are not exact; at the
check layer itself only K and V are computed for all, and all are kept, since they cost nothing more.
The last layer stops as soon as its K and V are written: nobody reads its output.

More tokens than vLLM's batch size go in pieces, as in its own chunked prefill: the model's memory was
measured for that size. Below the check layer that is one forward after another; there the pieces' rows
come together, and those that were picked go on in one.

A selector that looks at the question has it run first (`question_pass`). That leaves the stored KV of
all layers in the cache, and nothing is read again.

While a layer computes, the next layer's KV is read from the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from semkv_rag.blend import (
    MOST_LOOKING,
    SAMPLED,
    SELECTOR_TYPES,
    Candidates,
    decoded,
    expected_loss,
    first_half,
    left_share,
    needed,
    pick,
)
from semkv_rag.config import AUTO
from semkv_rag.connector.worker.blend.question_pass import (
    Asking,
    QuestionPass,
    picked_ask,
    question_asks,
)
from semkv_rag.connector.worker.blend.seen_change import SeenChange
from semkv_rag.connector.worker.blend.span_loader import KVSource, SpanKV, SpanLoader
from semkv_rag.connector.worker.model.eager import KVKnown
from semkv_rag.connector.worker.model.row_cut import RowCut, copy_arguments
from semkv_rag.reuse import Span

if TYPE_CHECKING:
    from semkv_rag.connector.messages import BlendTask
    from semkv_rag.connector.worker.blend.blend_pass import BlendPass


class BlendRun:
    """The state of one blend. Rows count from `task.start`; masks and indices are over rows.

    Attributes:
        positions: of all rows, [rows], int64.
        picked: the rows that a look at the KV picked; one tensor, or one for each layer behind the
            check layer where fewer go on from one to the next. Empty when nothing was looked at.
        risk: the loss that is expected of what was blended (`semkv_rag.blend.risk`); None where the
            selector cannot tell.
        unpromised: why all tokens were computed though the ratio is `auto`, in words, or None.
        computed_rows: tokens times layers that were computed; the check layer counts in full.
        waited_ms: the time that reading took.
    """

    def __init__(self, owner: BlendPass, task: BlendTask, sources: Mapping[str, KVSource]) -> None:
        self._owner, self._model, self._task = owner, owner.model, task
        self._sources = sources
        layers, paged = len(self._model.layers), self._model.paged
        plan, options = task.plan, task.plan.options
        self.positions = torch.arange(task.start, plan.covered, device=paged.device)
        self._blocks = torch.tensor(task.block_ids, device=paged.device)
        self._slots = paged.slots(self._blocks, self.positions)
        self._spans = [cut for span in plan.spans if (cut := _from(task.start, span)) is not None]
        self._reused = self._mask([span for span in self._spans if not span.exact])
        exact = self._mask([span for span in self._spans if span.exact])
        self._fresh = ~(self._reused | exact)
        self._candidates = torch.nonzero(self._reused).flatten()
        self._computed = ~exact

        self._seed = int.from_bytes(plan.digest()[:7])
        self._selector = SELECTOR_TYPES[options.selector]()
        self._check_layer = min(options.check_layer, layers - 1)
        count = round(options.effective_ratio * plan.reused_tokens)
        chooses = bool(len(self._candidates)) and count < plan.reused_tokens
        self._checks = chooses and self._selector.needs_check_layer
        asks = chooses and self._selector.needs_question and count > 0
        behind = layers - self._check_layer - 1 if self._checks else layers
        self._counts = self._selector.levels(options.effective_ratio, len(self._candidates), behind)
        self._automatic = options.ratio == AUTO and options.promise > 0
        if self._automatic:
            self._counts = [max(count, 1) for count in self._counts]
            asks = chooses
        remembered = owner.recall(task) if self._checks or asks else None
        self._recalled = remembered.rows if remembered is not None else None
        self.risk = remembered.risk if remembered is not None else None
        if self._selector.weighs_layers and not chooses:
            self.risk = 0.0
        self.unpromised: str | None = None
        self._weights: Tensor | None = None  # [layers, candidates], sensitivity
        self._attention: Tensor | None = None  # [layers, candidates]
        self._change: SeenChange | None = None
        self._asks = asks and self._recalled is None
        self.picked: list[Tensor] = []
        self._blindly = count if not self._checks and not asks else None
        self._loader: SpanLoader | None = None
        self._first = 0  # the first layer that takes stored KV
        self._stored: Sequence[SpanKV] = ()  # of the layer under way, or the check layer; by span
        self.computed_rows = 0
        self.waited_ms = 0.0

        self._launched = self._candidates[:0]
        self._pieces: list[Tensor] = []
        self._piece = 0
        self._arrived: list[_Arrived] = []  # at the check layer, by piece
        self._cut: RowCut | None = None
        self._going_on = self._launched  # rows that go on behind the check layer
        self._fewer: Tensor | None = None  # of the candidates, from the next layer on
        self._reached = -1

    @property
    def recomputed(self) -> int:
        """Reused tokens that were computed; the mean over layers where fewer go on."""
        if self.picked:
            return round(sum(len(rows) for rows in self.picked) / len(self._counts))
        return int((self._computed & self._reused).sum())

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self.waited_ms += self._loader.waited_ms
            self._loader = None

    def blend(self) -> None:
        """Find out which rows are computed, and compute them."""
        if self._asks:
            self._ask()
        if not self._checks:
            self._computed &= ~self._reused
            self._computed[self._picked_up_front()] = True
        if not self._asks:
            self._open()
        self._launched = torch.nonzero(self._computed).flatten()
        self._pieces = self._in_pieces(self._launched)
        hooks = [
            layer.decoder.register_forward_pre_hook(self._before(index), with_kwargs=True)
            for index, layer in enumerate(self._model.layers)
        ]
        try:
            for index, rows in enumerate(self._pieces):
                self._piece = index
                with contextlib.suppress(_PieceArrived):
                    self._fill(rows)
            if not self._pieces:
                raise _NothingLeft
        except _NothingLeft:
            for index in range(self._reached + 1, len(self._model.layers)):
                self._write_stored(index)
        finally:
            for hook in hooks:
                hook.remove()
        if self._attention is not None and self._selector.weighs_layers:
            self._judge()

    def _fill(self, rows: Tensor) -> None:
        positions = self.positions[rows]
        tokens = [self._task.tokens[position] for position in positions.tolist()]
        self._model.fill(tokens, self._blocks, positions, self._see)

    # ---- behind the last layer -------------------------------------------------------------

    def _judge(self) -> None:
        """Say how far off the blend is expected to be; with `auto`, compute until that is promised."""
        assert self._attention is not None
        change, weighed = self._seen_change(), torch.zeros(len(self._candidates))
        if change is not None and self._weights is not None:
            weighed = (self._attention * self._weights)[1:].sum(0)
            picked = torch.searchsorted(self._candidates, self.picked[0])
            self.risk = expected_loss(left_share(weighed, picked), change)
        promise = self._task.plan.options.promise
        if not self._automatic or (self.risk is not None and self.risk <= promise):
            return
        count, scores = len(self._candidates), torch.zeros(len(self._candidates))
        if change is None:
            self.unpromised = "computed whole: how far it is off cannot be told"
        else:
            scores = self._selector.scores(self._candidates_of(self._attention))
            count = needed(weighed, scores, change, promise)
            if count == len(self._candidates):
                self.unpromised = (
                    f"computed whole: expected to be off by {self.risk:.3f} nats a token"
                )
        picked = pick(scores, count)
        self.picked = [self._candidates[picked]]
        self.risk = 0.0
        if change is not None and count < len(self._candidates):
            self.risk = expected_loss(left_share(weighed, picked), change)
        # All of them once more: they are to have seen each other, as though they had been picked at once.
        self._change = None
        self._computed[self.picked[0]] = True
        for rows in self._in_pieces(torch.nonzero(self._computed).flatten()):
            self._fill(rows)
            self.computed_rows += len(rows) * len(self._model.layers)

    def _seen_change(self) -> float | None:
        """How far the computed tokens' V were off, as a multiple of their sensitivity, over all ranks."""
        if self._change is None:
            return None
        seen = torch.stack((self._change.changed, self._change.expected))
        changed, expected = self._owner.total(seen).tolist()
        return changed / expected if expected > 0 else 0.0

    def _watch(self, scores: Tensor, picked: Tensor) -> None:
        """Have the change of the highest of the picked tokens seen while they are computed."""
        if self._attention is None or self._weights is None or not len(picked):
            return
        sample = picked[pick(scores[picked], SAMPLED)]
        self._change = SeenChange(
            self._model.paged,
            self._owner.layouts,
            self._blocks,
            self.positions[self._candidates[sample]],
            self._attention[:, sample],
            self._weights[:, sample],
        )

    # ---- before the first layer ------------------------------------------------------------

    def _ask(self) -> None:
        """Have the question run; what it leaves in the cache need not be computed or read again."""
        question = self._task.plan.question
        if question is None:  # the prompt ends with an image
            even = torch.ones(len(self._candidates), device=self.positions.device)
            self._attention = even.expand(len(self._model.layers), -1)
            self._asks = False
            return
        asking = question_asks(
            question,
            self._task.tokens,
            self.positions[self._candidates],
            self.positions[self._fresh],
        )
        keep = self._check_layer if self._checks else None
        self._weights = self._sensitivity() if self._selector.weighs_layers else None
        self._attention, self._stored = self._look(asking, keep)
        # The text before the first candidate saw nothing but exact KV.
        self._computed[: self._candidates[0]] = False

    def _look(self, asking: Asking, keep: int | None = None) -> tuple[Tensor, Sequence[SpanKV]]:
        """What `asking` attends to, [layers, candidates], and the stored KV of layer `keep`."""
        look = QuestionPass(
            self._model,
            asking,
            blocks=self._blocks,
            covered=len(self._task.tokens),
            spans=self._spans,
            loader=lambda: self._make_loader(self._spans),
            pieces=self._in_pieces,
            keep=keep,
        )
        try:
            look.run()
        finally:
            self.waited_ms += look.waited_ms
        self.computed_rows += look.rows * len(self._model.layers)
        return self._owner.total(look.squares).sqrt(), look.kept

    def _sensitivity(self) -> Tensor | None:
        """Of all candidates, [layers, candidates]; None where no chunk has it stored.

        What a chunk without would have is taken to be the mean of the others', layer by layer.
        """
        spans = [span for span in self._spans if not span.exact]
        layers, parts = len(self._model.layers), list[Tensor | None]()
        for span in spans:
            codes = self._sources[span.chunk_id].sensitivity()
            rows = slice(span.src, span.src + span.length)
            fits = codes is not None and len(codes) == layers
            parts.append(decoded(codes[:, rows]) if codes is not None and fits else None)
        known = [part for part in parts if part is not None]
        if not known:
            return None
        mean = torch.cat(known, dim=1).mean(1, keepdim=True)
        filled = [
            mean.expand(layers, span.length) if part is None else part
            for span, part in zip(spans, parts, strict=True)
        ]
        return torch.cat(filled, dim=1).to(self.positions.device)

    def _picked_up_front(self) -> Tensor:
        """The rows that are picked before any layer, where none is checked."""
        if self._blindly is not None:
            return self._picked_blindly(self._blindly)
        if self._recalled is not None:
            self.picked = self._recalled
        else:
            scores = self._selector.scores(self._candidates_of(self._attention))
            count = self._counts[0]
            if self._selector.looks_twice and self._asks:
                scores = self._second_look(scores, first_half(count))
            picked = pick(scores, count)
            self.picked = [self._candidates[picked]]
            self._watch(scores, picked)
        return self.picked[0]

    def _second_look(self, scores: Tensor, count: int) -> Tensor:
        """Scores in which the `count` highest stay so, and the rest have what these attend to."""
        first = pick(scores, count)
        looking = first[pick(scores[first], MOST_LOOKING)]
        asking = picked_ask(self._task.tokens, self.positions[self._candidates], looking)
        attention, _ = self._look(asking)
        again = self._selector.scores(self._candidates_of(attention))
        again[first] = torch.inf
        return again

    def _picked_blindly(self, count: int) -> Tensor:
        """The rows that are picked without a look at the KV, out of the whole plan's tokens."""
        inexact = [span for span in self._task.plan.spans if not span.exact]
        if count == 0 or not inexact:
            return self._candidates[:0]
        positions = torch.cat([torch.arange(span.dst, span.end) for span in inexact])
        if count < len(positions):
            candidates = Candidates(rank_in_span=_ranks(inexact), seed=self._seed)
            positions = positions[pick(self._selector.scores(candidates), count)]
        rows = positions - self._task.start
        return rows[rows >= 0].to(self.positions.device)

    def _open(self) -> None:
        """Begin to read the spans that take stored KV."""
        # Up to the check layer all rows but the exact ones are computed.
        spans = [s for s in self._spans if self._checks or not self._computed[self._rows(s)].all()]
        self._spans = spans
        if spans:
            if self._checks and not any(span.exact for span in spans):
                self._first = self._check_layer
            self._loader = self._make_loader(spans, self._first)

    def _make_loader(self, spans: Sequence[Span], first: int = 0) -> SpanLoader:
        model, owner = self._model, self._owner
        device = self.positions.device
        return SpanLoader(spans, self._sources, model.layers, device, owner.loading, first)

    # ---- at each layer ---------------------------------------------------------------------

    def _before(self, index: int) -> Callable[..., tuple[Any, Any]]:
        def hook(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            if index > self._reached:  # the first piece to come here
                self._reached = index
                self._write_stored(index)
            if self._change is not None:
                self._change.before(index)
            if self._cut is None:
                self.computed_rows += len(self._pieces[self._piece])
                if not self._checks or index < self._check_layer:
                    return args, kwargs
                self._arrived.append(self._check(index, layer, args, kwargs))
                if len(self._arrived) < len(self._pieces):
                    raise _PieceArrived
                self._cut = self._select()
            else:
                if self._fewer is not None:
                    self._narrow(self._cut, self._fewer)
                self.computed_rows += len(self._going_on)
            if len(self._going_on) == 0:
                raise _NothingLeft
            cut: tuple[Any, Any] = self._cut.of((args, kwargs))
            return cut

        return hook

    def _see(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Compare once more what goes on, where fewer are to go on behind the next layer."""
        if self._change is not None:
            self._change.see(index, self.positions[self._pieces[self._piece]], values)
        level = index - self._check_layer
        if not self._checks or not 0 < level < len(self._counts):
            return
        rows = self.picked[-1]
        if self._recalled is not None:
            self._fewer = self._recalled[level] if level < len(self._recalled) else rows[:0]
        else:
            here = torch.searchsorted(self._going_on, rows)
            which = torch.searchsorted(self._candidates, rows)
            scores = self._selector.scores(
                self._candidates_of(None, self._deviation(keys[here], values[here], which), which)
            )
            self._fewer = rows[pick(scores, self._counts[level])]
        self.picked.append(self._fewer)

    def _check(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> _Arrived:
        """The fresh K and V of a piece at the check layer."""
        model, rows = self._model, self._pieces[self._piece]
        try:
            with model.tap.handling(_give_away):
                # vLLM's fused norms work in place: the layer runs on a copy.
                layer.forward(*copy_arguments(args), **copy_arguments(kwargs))
            raise RuntimeError("the check layer computed no keys and values")
        except KVKnown as known:
            keys, values = model.as_heads(index, known.keys, known.values)
        if self._selector.keeps_check_layer:
            model.tap.write(index, keys, values, self._slots[rows])
        return _Arrived(len(rows), (args, kwargs), keys, values)

    def _select(self) -> RowCut:
        """Pick the rows that go on, now that all have arrived at the check layer."""
        if self._recalled is not None:
            picked = self._recalled[0]
        elif self._counts[0] == 0:
            picked = self._candidates[:0]
        else:
            fresh = torch.searchsorted(self._launched, self._candidates)
            deviation = self._deviation(
                torch.cat([piece.keys for piece in self._arrived])[fresh],
                torch.cat([piece.values for piece in self._arrived])[fresh],
            )
            scores = self._selector.scores(self._candidates_of(self._attention, deviation))
            picked = self._candidates[pick(scores, self._counts[0])]
        self.picked = [picked]
        self._computed &= ~self._reused
        self._computed[picked] = True
        self._going_on = torch.nonzero(self._computed).flatten()
        cut = RowCut(
            [piece.arguments for piece in self._arrived],
            [piece.tokens for piece in self._arrived],
            torch.searchsorted(self._launched, self._going_on),
        )
        self._arrived = []
        self._attend()
        return cut

    def _narrow(self, cut: RowCut, picked: Tensor) -> None:
        """Let only the `picked` ones of the candidates go on."""
        self._fewer = None
        self._computed &= ~self._reused
        self._computed[picked] = True
        keep = torch.nonzero(self._computed[self._going_on]).flatten()
        self._going_on = self._going_on[keep]
        cut.narrow(keep)
        self._attend()

    def _attend(self) -> None:
        """Have attention expect the rows that go on."""
        if len(self._going_on):
            context = get_forward_context()
            context.attn_metadata, context.slot_mapping = self._model.paged.metadata(
                self._blocks, self.positions[self._going_on]
            )

    def _deviation(self, keys: Tensor, values: Tensor, which: Tensor | None = None) -> Tensor:
        """Of fresh KV from that of the layer under way, over all ranks.

        Args:
            which: of the candidates; None: all.
        """
        pairs = zip(self._spans, self._stored, strict=True)
        inexact = [kv for span, kv in pairs if not span.exact]
        stored_keys = torch.cat([stored for stored, _ in inexact])
        stored_values = torch.cat([stored for _, stored in inexact])
        if which is not None:
            stored_keys, stored_values = stored_keys[which], stored_values[which]
        return self._owner.total(self._selector.deviation(keys, values, stored_keys, stored_values))

    def _candidates_of(
        self, attention: Tensor | None, deviation: Tensor | None = None, which: Tensor | None = None
    ) -> Candidates:
        ranks = _ranks(self._spans)
        if which is not None:
            ranks = ranks[which.cpu()]
        return Candidates(ranks, self._seed, deviation, attention, self._weights)

    def _write_stored(self, index: int) -> None:
        """Write layer `index`'s stored KV, and note it where it is compared.

        What is computed is written over it soon after: to write all of a span is cheaper than to
        leave those rows out. Up to the check layer all rows but the exact ones are computed.
        """
        if self._loader is None or index < self._first:
            return
        stored = self._loader.layer(index)
        kept = self._check_layer + self._selector.keeps_check_layer
        for span, (keys, values) in zip(self._spans, stored, strict=True):
            if span.exact or not self._checks or index >= kept:
                self._model.tap.write(index, keys, values, self._slots[self._rows(span)])
        if self._checks and index >= self._check_layer:
            self._stored = stored

    def _rows(self, span: Span) -> slice:
        return slice(span.dst - self._task.start, span.end - self._task.start)

    def _mask(self, spans: Sequence[Span]) -> Tensor:
        mask = torch.zeros(len(self.positions), dtype=torch.bool, device=self.positions.device)
        for span in spans:
            mask[self._rows(span)] = True
        return mask

    def _in_pieces(self, rows: Tensor) -> list[Tensor]:
        """`rows` in as few pieces as vLLM's batch size allows, of about the same length."""
        if len(rows) == 0:
            return []
        return list(rows.tensor_split(-(-len(rows) // self._owner.piece_tokens)))


class _PieceArrived(Exception):
    """Stops a forward at the check layer, where its rows wait for those of the other pieces."""


class _NothingLeft(Exception):
    """Stops a forward: no token goes on, only stored KV is left to be written."""


def _give_away(index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    raise KVKnown(keys, values)


def _from(start: int, span: Span) -> Span | None:
    """The part of `span` from prompt position `start` on, or None when there is none."""
    cut = max(start - span.dst, 0)
    if cut >= span.length:
        return None
    return replace(span, src=span.src + cut, dst=span.dst + cut, length=span.length - cut)


def _ranks(spans: Sequence[Span]) -> Tensor:
    """For the inexact tokens of `spans`, which token of its span each is."""
    return torch.cat([torch.arange(span.length) for span in spans if not span.exact])


@dataclass(frozen=True)
class _Arrived:
    """One piece of the launched rows at the check layer: what the layer was called with, its K, V."""

    tokens: int
    arguments: Any
    keys: Tensor
    values: Tensor
