"""One blend: which of a request's reused tokens are computed, and their computation.

First the selector is given what it asks for: the question's attention over the stored KV
(`question_pass`), and the deviation of fresh from stored KV at a check layer (`check_pass`). Then the
picked rows and the fresh ones run through the model, in position order, over the stored KV of the others
(CacheBlend, arXiv 2405.16444). The model itself is called, eagerly, and nothing is written per
architecture. More rows than vLLM's batch size go in pieces, as in its own chunked prefill: the model's
memory was measured for that size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from semkv_rag.blend import Candidates, decoded, pick, selector_type
from semkv_rag.config import AUTO
from semkv_rag.connector.messages import BlendTask
from semkv_rag.connector.worker.blend.check_pass import CheckPass
from semkv_rag.connector.worker.blend.expectation import Expectation
from semkv_rag.connector.worker.blend.question_pass import QuestionPass, question_asks
from semkv_rag.connector.worker.blend.rows import BlendRows, ranks
from semkv_rag.connector.worker.blend.seen_change import SeenChange
from semkv_rag.connector.worker.blend.setting import BlendSetting, Picked
from semkv_rag.connector.worker.blend.span_loader import KVSource, SpanKV, SpanLoader
from semkv_rag.connector.worker.blend.stored_kv import StoredKV
from semkv_rag.reuse import Span


class BlendRun:
    """The state of one blend.

    Args:
        recalled: what was picked for the same plan and prompt before, or None.

    Attributes:
        rows: what is blended.
        picked: the rows that a look at the KV picked, [picked], int64; None when nothing was looked at.
        recomputed: reused tokens that were computed.
        risk: the loss that is expected of what was blended (`semkv_rag.blend.risk`), nats a token; None
            where the selector cannot tell.
        unpromised: why all tokens were computed though the ratio is `auto`, in words, or None.
        computed_rows: tokens times layers that were computed; a check layer counts in full.
        waited_ms: the time that reading took.
    """

    def __init__(
        self,
        setting: BlendSetting,
        task: BlendTask,
        sources: Mapping[str, KVSource],
        recalled: Picked | None,
    ) -> None:
        self._setting, self._model = setting, setting.model
        self._plan, self._sources, self._recalled = task.plan, sources, recalled
        self.rows = BlendRows.of(task, setting.model.paged)
        options = task.plan.options
        self._selector = selector_type(options.selector)()
        self._check_layer = min(options.check_layer, len(setting.model.layers) - 1)
        self._automatic = options.ratio == AUTO and options.promise > 0
        self._fresh = self.rows.fresh  # those that are still to be computed
        self._expected: Expectation | None = None
        self._loaded = False  # all stored KV is in the cache
        self._writer: StoredKV | None = None  # what brings it there otherwise
        # The check layer's stored KV, where the question's pass has read it.
        self._compared: Sequence[SpanKV] = ()
        self.picked: Tensor | None = None
        self.recomputed = 0
        self.risk: float | None = None
        self.unpromised: str | None = None
        self.computed_rows = 0
        self.waited_ms = 0.0

    def blend(self) -> None:
        """Find out which rows are computed, and compute them.

        Raises:
            ChunkFileError: a chunk's KV cannot be had.
        """
        ratio, plan = self._plan.options.effective_ratio, self._plan
        count = round(ratio * plan.reused_tokens)
        chooses = bool(len(self.rows.candidates)) and count < plan.reused_tokens
        if self._selector.weighs_layers and not chooses:
            self.risk = 0.0
        looks = self._selector.needs_question or self._selector.needs_check_layer
        try:
            if chooses and looks and (count or self._automatic):
                count = round(ratio * len(self.rows.candidates))
                self._blend_by_looking(max(count, 1) if self._automatic else count)
            else:
                self._blend_without(count)
        finally:
            if self._writer is not None:
                self.waited_ms += self._writer.close()

    def _blend_without(self, count: int) -> None:
        """Pick without a look at the KV, out of the whole plan's tokens."""
        inexact = [span for span in self._plan.spans if not span.exact]
        picked = self.rows.candidates[:0]
        if count and inexact:
            positions = torch.cat([torch.arange(span.dst, span.end) for span in inexact])
            if count < len(positions):
                scores = self._selector.scores(Candidates(ranks(inexact), self._seed))
                positions = positions[pick(scores, count)]
            picked = (positions - self.rows.start).to(picked.device)
            picked = picked[picked >= 0]
        self._open_for(picked)
        self._recompute(picked)

    def _blend_by_looking(self, count: int) -> None:
        if self._recalled is not None:
            self.picked, self.risk = self._recalled.rows, self._recalled.risk
            if self._selector.needs_check_layer:
                self._check()
            else:
                self._open_for(self.picked)
            self._recompute(self.picked)
            return
        scores = self._scores()
        picked = pick(scores, count)
        self.picked = self.rows.candidates[picked]
        if not self._loaded and self._writer is None:
            self._open_for(self.picked)
        if self._expected is None:
            self._recompute(self.picked)
            return
        make = partial(SeenChange, self._model.paged, self._setting.layouts, self.rows.blocks)
        self._expected.watch(make, self.rows, scores, picked)
        self._recompute(self.picked)
        self._keep_promise(self._expected, scores, picked)

    def _scores(self) -> Tensor:
        """The selector's, [candidates], behind the passes that it needs."""
        selector, attention, sensitivity, deviation = self._selector, None, None, None
        if selector.needs_question:
            attention = self._ask()
            if selector.weighs_layers:
                sensitivity = self._sensitivity() if self._loaded else None
                self._expected = Expectation(attention, sensitivity, self._setting.total)
        if selector.needs_check_layer:
            deviation = self._check()
        return selector.scores(
            Candidates(ranks(self.rows.inexact), self._seed, deviation, attention, sensitivity)
        )

    def _keep_promise(self, expected: Expectation, scores: Tensor, picked: Tensor) -> None:
        """Say how far off the blend is expected to be; with `auto`, compute until that is promised."""
        expected.take()
        self.risk = expected.loss(picked)
        promise = self._plan.options.promise
        if not self._automatic or (self.risk is not None and self.risk <= promise):
            return
        picked = expected.pick_for(promise, scores)
        everything = len(picked) == len(scores)
        if self.risk is None:
            self.unpromised = "computed whole: how far it is off cannot be told"
        elif everything:
            self.unpromised = f"computed whole: expected to be off by {self.risk:.3f} nats a token"
        self.risk = 0.0 if everything else expected.loss(picked)
        # The first ones once more: all are to have seen each other, as though picked at once.
        self.picked = self.rows.candidates[picked]
        self._recompute(self.picked)

    # ---- what a selector is given ----------------------------------------------------------

    def _ask(self) -> Tensor:
        """The question's attention, [layers, candidates]. Its pass leaves all stored KV in the cache."""
        rows, question = self.rows, self._plan.question
        if question is None:  # the prompt ends with an image
            even = torch.ones(len(rows.candidates), device=rows.positions.device)
            return even.expand(len(self._model.layers), -1)
        asking = question_asks(
            question, rows.tokens, rows.positions[rows.candidates], rows.positions[rows.fresh]
        )
        asked = QuestionPass(
            self._model,
            asking,
            blocks=rows.blocks,
            covered=len(rows.tokens),
            spans=rows.spans,
            loader=lambda: self._loader(rows.spans),
            pieces=self._pieces,
            keep=self._check_layer if self._selector.needs_check_layer else None,
        )
        try:
            asked.run()
        finally:
            self.waited_ms += asked.waited_ms
        self.computed_rows += asked.rows * len(self._model.layers)
        # The text before the first candidate saw nothing but exact KV, and is right.
        self._fresh = rows.fresh[rows.fresh > rows.candidates[0]]
        self._loaded = True
        if asked.kept:
            pairs = zip(rows.spans, asked.kept, strict=True)
            self._compared = [kv for span, kv in pairs if not span.exact]
        return self._setting.total(asked.squares).sqrt()

    def _check(self) -> Tensor:
        """Run the check; the deviation of each candidate, [candidates].

        Where the stored KV is not in the cache yet, the layers above the check layer take theirs later.
        """
        rows, layer, writer = self.rows, self._check_layer, None
        if not self._loaded:
            first = 0 if any(span.exact for span in rows.spans) else layer
            loader = self._loader(rows.spans, first)
            writer = self._writer = StoredKV(self._model, rows, rows.spans, loader, layer)
        launched = torch.cat((rows.candidates, self._fresh)).sort().values
        check = CheckPass(self._model, rows, self._pieces(launched), layer)
        with contextlib.nullcontext() if writer is None else writer.arriving():
            check.run()
        self.computed_rows += check.computed_rows
        stored = self._compared if writer is None else writer.compared
        return self._setting.total(check.deviation(self._selector, stored))

    def _sensitivity(self) -> Tensor | None:
        """Of all candidates, [layers, candidates]; None where no chunk has it stored.

        What a chunk without would have is taken to be the mean of the others', layer by layer.
        """
        spans, layers = self.rows.inexact, len(self._model.layers)
        parts = list[Tensor | None]()
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
        return torch.cat(filled, dim=1).to(self.rows.positions.device)

    # ---- computing -------------------------------------------------------------------------

    def _recompute(self, picked: Tensor) -> None:
        """Compute the picked rows and the fresh ones; the others have their stored KV then."""
        self.recomputed = len(picked)
        seen = None if self._expected is None else self._expected.seen
        with contextlib.ExitStack() as hooks:
            if self._writer is not None:
                hooks.enter_context(self._writer.arriving())
            if seen is not None:
                hooks.enter_context(self._model.reaching(seen.before))
            for piece in self._pieces(torch.cat((picked, self._fresh)).sort().values):
                positions = self.rows.positions[piece]
                see = None if seen is None else partial(seen.see, positions)
                self._model.fill(self.rows.tokens_of(piece), self.rows.blocks, positions, see)
                self.computed_rows += len(piece) * len(self._model.layers)
        if self._writer is not None:
            self._writer.finish()

    def _open_for(self, picked: Tensor) -> None:
        """Begin to read the spans of which not all rows are computed."""
        computed = torch.zeros(len(self.rows.positions), dtype=torch.bool, device=picked.device)
        computed[picked] = True
        spans = [one for one in self.rows.spans if not computed[self.rows.of_span(one)].all()]
        if spans:
            self._writer = StoredKV(self._model, self.rows, spans, self._loader(spans))

    def _loader(self, spans: Sequence[Span], first: int = 0) -> SpanLoader:
        device, thread = self.rows.positions.device, self._setting.loading
        return SpanLoader(spans, self._sources, self._model.layers, device, thread, first)

    def _pieces(self, rows: Tensor) -> list[Tensor]:
        """`rows` in as few pieces as vLLM's batch size allows, of about the same length."""
        if len(rows) == 0:
            return []
        return list(rows.tensor_split(-(-len(rows) // self._setting.piece_tokens)))

    @property
    def _seed(self) -> int:
        return int.from_bytes(self._plan.digest()[:7])
