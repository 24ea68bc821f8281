"""One blend: which of a request's reused tokens are computed, and their computation.

First the selector is given what it asks for: the question's attention over the stored KV
(`question_pass`), and the deviation of fresh from stored KV at a check layer (`check_pass`). Then the
picked rows and the fresh ones run through the model, in position order, over the stored KV of the others
(CacheBlend, arXiv 2405.16444). The model itself is called, and nothing is written per architecture.

A run says what it wants computed, launch by launch, and goes on when that is done. Whoever drives it cuts
the launches as the steps' budgets allow, and computes those of several requests together.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from semkv_rag.blend import Candidates, pick, selector_type
from semkv_rag.config import AUTO
from semkv_rag.connector.messages import BlendTask
from semkv_rag.connector.worker.blend.check_pass import CheckPass
from semkv_rag.connector.worker.blend.expectation import Expectation
from semkv_rag.connector.worker.blend.launch import Launch
from semkv_rag.connector.worker.blend.number_pass import NumberPass
from semkv_rag.connector.worker.blend.question_pass import QuestionPass, question_asks
from semkv_rag.connector.worker.blend.rows import BlendRows, ranks
from semkv_rag.connector.worker.blend.setting import BlendSetting, Picked
from semkv_rag.connector.worker.blend.stored_kv import Loading, Sources, StoredKV
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.model.slice import Watcher
from semkv_rag.connector.worker.ranks import total


class BlendRun:
    """One blend; its stored KV begins to load at once.

    Args:
        sources: of the KV of the plan's chunks.
        recalled: what was picked for the same plan and prompt before, or None.

    Attributes:
        rows: what is blended.
        stored: the KV that is not computed.
        picked: the rows that a look at the KV picked, [picked], int64; None when nothing was looked at.
        recomputed: the reused rows that were computed, [recomputed], int64.
        picked_at: when a look at the KV had picked, seconds since the epoch; None when nothing was looked
            at.
        scores: the selector's, of all candidates, [candidates]; None when nothing was looked at.
        risk: the loss that is expected of what was blended (`semkv_rag.blend.risk`), nats a token; None
            where the selector cannot tell.
        unpromised: why all tokens were computed though the ratio is `auto`, in words, or None.
        computed_rows: tokens times layers that were computed; a check layer counts in full.
    """

    def __init__(
        self,
        setting: BlendSetting,
        task: BlendTask,
        sources: Sources,
        recalled: Picked | None,
    ) -> None:
        self._setting, self._model, self._task = setting, setting.model, task
        self.rows = BlendRows.of(task, setting.model)
        options = task.plan.options
        self._selector = selector_type(options.selector)()
        self._check_layer = min(options.check_layer, setting.model.ranks.layers - 1)
        self._automatic = options.ratio == AUTO and options.promise > 0
        self._fresh = self.rows.fresh  # those that are still to be computed
        self._expected: Expectation | None = None
        self.picked: Tensor | None = None
        self.recomputed = self.rows.candidates[:0]
        self.picked_at: float | None = None
        self.scores: Tensor | None = None
        self.risk: float | None = None
        self.unpromised: str | None = None
        self.computed_rows = 0

        plan = task.plan
        count = round(options.ratio_of(plan.reused_tokens) * plan.reused_tokens)
        chooses = bool(len(self.rows.candidates)) and count < plan.reused_tokens
        if self._selector.weighs_layers and not chooses:
            self.risk = 0.0
        asks = self._selector.needs_question or self._selector.needs_check_layer
        self._looks = chooses and asks and bool(count or self._automatic)
        self._known: Tensor | None = None  # rows that are picked without a look
        if not self._looks:
            self._known = self._pick_blindly(count)
        elif recalled is not None:
            self._known = self.picked = recalled.rows
            self.risk = recalled.risk
        if self._looks:
            candidates = len(self.rows.candidates)
            count = round(options.ratio_of(candidates) * candidates)
            self._count = max(count, 1) if self._automatic else count
        self.stored = self._load(sources)

    def launches(self) -> Iterator[Launch]:
        """What is computed, one launch after the other; the blend is done when there is no more.

        Raises:
            LostKV: a chunk's KV cannot be had.
        """
        if self._known is not None:
            if self._looks and self._selector.needs_check_layer:
                yield from self._check()
            yield from self._recompute(self._known)
        else:
            yield from self._look_and_recompute()
        self.stored.wait_for_all()
        if self._task.behind:
            for launch in NumberPass(self._setting, self._task).launches():
                yield launch
                self.computed_rows += len(launch) * self._model.ranks.layers

    def _pick_blindly(self, count: int) -> Tensor:
        """Pick without a look at the KV, out of the whole plan's tokens; rows."""
        inexact = [span for span in self._task.plan.spans if not span.exact]
        if not count or not inexact:
            return self.rows.candidates[:0]
        positions = torch.cat([torch.arange(span.dst, span.end) for span in inexact])
        if count < len(positions):
            scores = self._selector.scores(Candidates(ranks(inexact), self._seed))
            positions = positions[pick(scores, count)]
        picked = (positions - self.rows.start).to(self.rows.candidates.device)
        return picked[picked >= 0]

    def _load(self, sources: Sources) -> StoredKV:
        """Begin to load the spans of which not all rows are known to be computed."""
        rows, setting, spans = self.rows, self._setting, self.rows.spans
        if self._known is not None and not (self._looks and self._selector.needs_check_layer):
            computed = torch.zeros(len(rows.positions), dtype=torch.bool)
            computed[self._known.cpu()] = True
            spans = [span for span in spans if not computed[rows.of_span(span)].all()]
        asks = self._known is None and self._selector.needs_question
        return StoredKV(
            self._model,
            rows,
            spans,
            sources,
            setting.loading,
            keeps_keys=asks and setting.may_keep_keys(len(rows.candidates)),
            weighs=asks and self._selector.weighs_layers,
        )

    def _look_and_recompute(self) -> Iterator[Launch]:
        scores = self.scores = yield from self._score()
        self.picked_at = time.time()
        picked = pick(scores, self._count)
        self.picked = self.rows.candidates[picked]
        if self._expected is None:
            yield from self._recompute(self.picked)
            return
        make = partial(ReadBack, self._model.paged, self._setting.layouts, self.rows.blocks)
        self._expected.watch(make, self.rows, scores, picked)
        yield from self._recompute(self.picked)
        yield from self._keep_promise(self._expected, scores, picked)

    def _score(self) -> Generator[Launch, None, Tensor]:
        """The selector's scores, [candidates], behind the passes that it needs."""
        selector, attention, sensitivity, deviation = self._selector, None, None, None
        if selector.needs_question:
            attention = yield from self._ask()
            self.stored.wait_for_all()
            if selector.weighs_layers:
                if self._task.plan.question is not None:
                    sensitivity = self._sensitivity()
                self._expected = Expectation(attention, sensitivity, self._model.ranks)
        if selector.needs_check_layer:
            deviation = yield from self._check()
        return selector.scores(
            Candidates(ranks(self.rows.inexact), self._seed, deviation, attention, sensitivity)
        )

    def _keep_promise(
        self, expected: Expectation, scores: Tensor, picked: Tensor
    ) -> Iterator[Launch]:
        """Say how far off the blend is expected to be; with `auto`, compute until that is promised."""
        expected.take()
        self.risk = expected.loss(picked)
        promise = self._task.plan.options.promise
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
        yield from self._recompute(self.picked)

    # ---- what a selector is given ----------------------------------------------------------

    def _ask(self) -> Generator[Launch, None, Tensor]:
        """The question's attention, [layers, candidates]. Its pass leaves all stored KV in the cache."""
        rows, question = self.rows, self._task.plan.question
        if question is None:  # the prompt ends with an image
            even = torch.ones(len(rows.candidates), device=rows.positions.device)
            return even.expand(self._model.ranks.layers, -1)
        asking = question_asks(
            question, rows.tokens, rows.positions[rows.candidates], rows.positions[rows.fresh]
        )
        asked = QuestionPass(self._setting, asking, rows, self.stored)
        for launch in asked.launches(self._setting.piece_tokens):
            yield launch
            self.computed_rows += len(launch) * self._model.ranks.layers
        # The text before the first candidate saw nothing but exact KV, and is right.
        self._fresh = rows.fresh[rows.fresh > rows.candidates[0]]
        return self._model.ranks.of_all_layers(asked.squares).sqrt()

    def _sensitivity(self) -> Tensor | None:
        """The candidates' stored sensitivity, [layers, candidates]; None where no rank has it.

        Each rank has stored it of its own heads and layers, and all have to pick the same tokens.
        """
        stored, device = self.stored.sensitivity, self.rows.positions.device
        shape = len(self._model.layers), len(self.rows.candidates)
        squares = torch.zeros(shape) if stored is None else stored.square()
        have_it = total(torch.tensor([float(stored is not None)], device=device))
        squares = self._model.ranks.of_all_layers(squares.to(device))
        return squares.sqrt() if float(have_it) else None

    def _check(self) -> Generator[Launch, None, Tensor]:
        """Run the check; the deviation of each candidate, [candidates]."""
        rows, layer, paged = self.rows, self._check_layer, self._model.paged
        # As this rank counts its layers; it may be none of them.
        own = layer - self._model.ranks.first_layer
        if own >= 0:
            self.stored.wait(min(own, len(self._model.layers) - 1))
        candidates = rows.positions[rows.candidates]
        read = ReadBack(paged, self._setting.layouts, rows.blocks, candidates)
        compared = read.both(own) if 0 <= own < len(self._model.layers) else None
        check = CheckPass(own)
        launch = self._launch(torch.cat((rows.candidates, self._fresh)), check)
        yield replace(launch, until=layer)
        self.computed_rows += len(launch) * (layer + 1)
        deviation = torch.zeros(len(candidates), device=paged.device)
        if compared is not None:
            deviation = check.deviation(self._selector, candidates, compared)
        return total(deviation)

    # ---- computing -------------------------------------------------------------------------

    def _recompute(self, picked: Tensor) -> Iterator[Launch]:
        """Compute the picked rows and the fresh ones; the others have their stored KV then."""
        self.recomputed = picked
        rows = torch.cat((picked, self._fresh))
        seen = None if self._expected is None else self._expected.seen
        if len(rows):
            # Whoever looks at what is stored has seen all of it come.
            yield self._launch(rows, seen or Loading(self.stored))
            self.computed_rows += len(rows) * self._model.ranks.layers

    def _launch(self, rows: Tensor, watcher: Watcher) -> Launch:
        positions = self.rows.positions[rows.sort().values]
        return Launch(self.rows.tokens, self.rows.blocks, positions, watcher)

    @property
    def _seed(self) -> int:
        return int.from_bytes(self._task.plan.digest()[:7])
