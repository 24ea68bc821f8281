"""A request from its arrival to its end, as the scheduler's side knows it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from semkv_rag.config import AUTO, ReuseOptions
from semkv_rag.connector.images.blended import BlendImage
from semkv_rag.connector.images.lookup import StateLookup
from semkv_rag.connector.images.report import take_image_report
from semkv_rag.connector.messages import BlendResult, BlendStats, BlendTask, Blocks, SeenTokens
from semkv_rag.connector.metrics import Fault, PlainReason
from semkv_rag.connector.scheduler.owners import Owner
from semkv_rag.report import ReuseReport
from semkv_rag.reuse import (
    ImageRows,
    ReusePlan,
    Span,
    TokenArray,
    images_in_blend,
    tell_images_apart,
    token_array,
)
from semkv_rag.reuse.mapped import token_map
from semkv_rag.wire import CAPTURED_KEY, COUNTED_KEY, PARAMS_KEY, TIMES_KEY, Times

if TYPE_CHECKING:
    from vllm.v1.request import Request


def first_report(request: Request, options: ReuseOptions, reason: str | None = None) -> ReuseReport:
    """The report of a request that has no plan: it is served plainly so far."""
    return ReuseReport(
        kv_cache="skip",
        prompt_tokens=request.num_prompt_tokens,
        ratio=0.0 if options.ratio == AUTO else options.ratio,
        selector=options.selector,
        reason=reason,
    )


@dataclass
class TrackedRequest:
    """One live request.

    Attributes:
        options: its own.
        owner: whose KV it reads and writes.
        look_up: what is stored of its prompt, until the plan is made; `since` when it began.
        images: in prompt order, each under the key it is taken for.
        names: of the images' features, as they are loaded and saved; given to the request with the plan.
        first_near: where the first image stands that is taken for another one.
        answer_tokens: at the prompt's end, that are an answer to it.
        blend: the one that was asked for last, until a forward has run behind it.
        capture: the wish that the prompt be captured; `captured` once the workers were told.
        loaded_tokens: of the prompt, those whose KV is as it was stored.
        fault: what went wrong with its reuse.
        plain_reason: why it is answered without stored KV; None where it is not, or not known yet.
        seen: what its blend did with each token, if that is to be told.
        times: when the parts of its reuse began and ended.
    """

    request: Request
    options: ReuseOptions
    report: ReuseReport
    owner: Owner
    look_up: Future[list[Span]] | None = None
    since: float = 0.0
    images: list[ImageRows] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    first_near: int | None = None
    answer_tokens: int = 0
    plan: ReusePlan | None = None
    blend: BlendTask | None = None
    capture: Mapping[str, Any] | None = None
    captured: bool = False
    in_prefix_cache: int = 0
    loaded_tokens: int = 0
    fault: Fault | None = None
    plain_reason: PlainReason | None = None
    seen: SeenTokens | None = None
    times: Times = field(default_factory=dict)

    @property
    def captures_alone(self) -> bool:
        """Whether it is nobody's request, and there for a capture."""
        return self.capture is not None and not self.capture.get("in_passing")

    def tokens(self) -> TokenArray:
        """The prompt's tokens as they are matched and stored."""
        return tell_images_apart(token_array(self.request.prompt_token_ids), self.images)

    def matchable(self) -> TokenArray:
        """Those of them in which chunks are looked for."""
        tokens = self.tokens()
        return tokens[: len(tokens) - self.answer_tokens]

    @cached_property
    def blend_key(self) -> bytes:
        """Equal for requests whose blends put the same KV into the cache."""
        return self.blend_task((), 0).key()

    def blend_task(
        self, block_ids: Blocks, start: int, lookup: StateLookup | None = None
    ) -> BlendTask:
        """The blend that fills its blocks.

        Args:
            block_ids: of the request.
            start: so many of its first tokens are in the cache already.
            lookup: of images' features; None where they are not stored.
        """
        assert self.plan is not None
        features = self.request.mm_features
        images = tuple(
            lookup.blended(self.request, number)
            if computed and lookup is not None
            else BlendImage(features[number])
            for number, computed in images_in_blend(self.plan, self.images).items()
        )
        return BlendTask(
            request_id=self.request.request_id,
            plan=self.plan,
            tokens=list(self.request.prompt_token_ids[: self.plan.covered]),
            block_ids=block_ids,
            start=start,
            model=self.owner.model,
            adapter=self.owner.adapter,
            images=images,
        )

    def salts(self, block_size: int) -> dict[int, bytes]:
        """What goes into the hashes of its blocks, by the block from which on it counts.

        Blocks whose KV is not the tokens' own are found by requests of the same plan only.
        """
        salts = {0: self.owner.salt} if self.owner.salt else {}
        if self.first_near is not None:
            taken_for = "".join(image.key for image in self.images)
            block = self.first_near // block_size
            salts[block] = salts.get(block, b"") + b"near:" + taken_for.encode()
        if self.plan is not None and (first := self.plan.first_inexact) is not None:
            block = first // block_size
            salts[block] = salts.get(block, b"") + b"plan:" + self.plan.digest()
        return salts

    def finds_its_chunk(self, computed: int) -> bool:
        """Whether vLLM has found part of the chunk that is to be captured in its prefix cache.

        Where windows' layers have given up blocks, these cannot be read.
        """
        return (
            self.capture is not None and self.captures_alone and computed > self.capture["context"]
        )

    def chunk_afresh(self, block_size: int) -> dict[int, bytes]:
        """What goes into the hashes of its chunk's blocks, so that they are computed once more."""
        assert self.capture is not None
        ticket = self.request.request_id.encode()
        return {int(self.capture["context"]) // block_size: b"capture:" + ticket}

    def is_to_be_captured(self, end: int) -> bool:
        """Whether it is wished for, was not done, and the prompt is computed up to its end by `end`."""
        wished = self.capture is not None and not self.captured
        return wished and end >= self.request.num_prompt_tokens

    def note_plan(self, reason: str, took_s: float) -> None:
        """Take the plan into the report, or that there is none.

        Args:
            reason: in words, why there is none.
            took_s: finding the chunks and planning.
        """
        plan, now = self.plan, time.time()
        self.times["match"] = (now - took_s, now)
        self.plain_reason = self.plain_reason if plan is None else None
        ratio = self.report.ratio
        if plan is not None and plan.options.least_tokens:
            ratio = round(plan.options.ratio_of(plan.reused_tokens), 4)
        self.report = replace(
            self.report,
            ratio=ratio,
            kv_cache="miss" if plan is None else "hit",
            exact_tokens=plan.exact_tokens if plan else 0,
            reused_tokens=plan.reused_tokens if plan else 0,
            chunk_ids=tuple(span.chunk_id for span in plan.spans) if plan else (),
            codecs=plan.codecs if plan else (),
            match_ms=round(took_s * 1000, 3),
            reason=reason if plan is None else None,
        )

    def take(self, result: BlendResult) -> None:
        """Take the outcome of its blend into the report."""
        stats = result.stats
        if stats is None:
            self.fault, self.plain_reason = result.fault, "fault" if result.fault else "no_room"
            self.loaded_tokens = 0
            self.plan = self.blend = None  # it is computed, whatever becomes of it
            self.report = replace(
                self.report,
                kv_cache="miss",
                exact_tokens=0,
                reused_tokens=0,
                recomputed_tokens=0,
                chunk_ids=(),
                codecs=(),
                reason=result.error,
            )
            return
        self.seen = stats.seen
        self._note_times(stats)
        if self.blend is not None:
            start, spans = self.blend.start, self.blend.plan.spans
            stored = sum(max(0, span.end - max(span.dst, start)) for span in spans)
            self.loaded_tokens = stored - stats.recomputed
        if self.options.ratio == AUTO and self.report.reused_tokens:
            spent = round(stats.recomputed / self.report.reused_tokens, 4)
            self.report = replace(self.report, ratio=spent, reason=stats.note)
        self.report = replace(
            self.report,
            risk=None if stats.risk is None else round(stats.risk, 5),
            recomputed_tokens=stats.recomputed,
            charged_ratio=round(stats.charged_ratio, 4),
            load_ms=round(stats.load_ms, 3),
            blend_ms=round(stats.blend_ms, 3),
            memory_bytes=stats.memory_bytes,
            file_bytes=stats.file_bytes,
            object_bytes=stats.object_bytes,
        )

    def _note_times(self, stats: BlendStats) -> None:
        began, ended = stats.began_at, stats.began_at + stats.blend_ms / 1000
        picked = stats.picked_at or began
        self.times["load"] = (began, began + stats.load_ms / 1000)
        if stats.picked_at is not None:
            self.times["pick"] = (began, picked)
        self.times["recompute"] = (picked, ended)

    def final_report(self) -> ReuseReport:
        """The report, once the request has ended; asked for once."""
        report = replace(self.report, preemptions=self.request.num_preemptions)
        if self.options.token_map:
            seen = self.seen or SeenTokens((), 0, "")
            shown = token_map(
                self.plan, report.cached_tokens, seen.recomputed, seen.scores, seen.start
            )
            report = replace(report, token_map=shown)
        images = take_image_report(self.request.request_id)
        if images is not None:
            report = report.with_images(
                images.loaded, images.computed, images.mapped, images.reason
            )
        return report

    def counts(self, stalls_s: Sequence[float]) -> dict[str, Any] | None:
        """What `ReuseStats.count` wants to know beside the report; None where it is nobody's request.

        Args:
            stalls_s: that are counted with it.
        """
        if self.captures_alone:
            return None
        seconds = {
            name: ended - began
            for name, (began, ended) in self.times.items()
            if name in ("pick", "recompute")
        }
        return {
            "loaded_tokens": self.loaded_tokens,
            "fault": self.fault,
            "plain_reason": self.plain_reason,
            "seconds": seconds,
            "stalls_s": stalls_s,
        }

    def answer(self, report: ReuseReport, counts: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer's `kv_transfer_params`: the report, and whether the request was captured.

        Args:
            counts: as they were counted; None where they were not.
        """
        said: dict[str, Any] = {PARAMS_KEY: report.to_mapping()}
        if counts is not None:
            said[COUNTED_KEY] = counts
        if self.times:
            said[TIMES_KEY] = self.times
        if self.captured:
            said[CAPTURED_KEY] = True
        return said
