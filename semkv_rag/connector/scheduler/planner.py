"""The scheduler's half of the connector: what is reused by which request, and where it goes.

Called from vLLM's scheduler, all in one thread. For each request, in this order:

* `new_request` once, when it arrives: its options are read, stored chunks are looked for in its prompt,
  the plan is made, and the hashes of the blocks that the plan makes inexact are salted.
* `matched_tokens` whenever it is about to be scheduled, again after a preemption. Where the look-up was
  not done in time for `new_request`, the plan is made here or in `step`; vLLM serves others meanwhile.
  Planned once, a request is planned for good.
* `allocated` when it got its blocks: the blend is handed to the workers with the coming step. vLLM keeps
  the request out of its steps until the workers say that the blend has ended.
* `step` once for every step: the work of the workers.
* `results` when a step's outcome is known.
* `finished` once: the report.

**Prefix caching stays exact.** vLLM finds a cached block by a hash over its tokens and all before it.
Blocks that hold blended KV must not be found by a request that did not ask for the same blend, so the
plan's digest goes into the hash of the block with the first inexact token, and with that into all behind
it, those that fill up while the answer is decoded included (`block_hashes`). Blocks before it are shared
with ordinary requests of the namespace. Namespaces are kept apart by vLLM's `cache_salt`, which a request
has when it arrives here (`engine.client`).

**A prompt is blended once.** vLLM has a blend's blocks found once the blend has ended. A request with
the same prompt and plan as one under way waits for that, and finds them.

**Windows.** With vLLM's hybrid KV cache manager a blend has blocks beside its request's own, see
`request_blocks`. Images: see `admission`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.messages import (
    BlendResult,
    BlendTask,
    Blocks,
    GateReport,
    StepMetadata,
    WorkerResults,
)
from semkv_rag.connector.metrics import PlainReason, ReuseStats
from semkv_rag.connector.scheduler.admission import ImageRules, note_images, obstacle, wishes_in
from semkv_rag.connector.scheduler.block_hashes import salt_blocks
from semkv_rag.connector.scheduler.catalogue import Catalogue
from semkv_rag.connector.scheduler.owners import Owner, Owners
from semkv_rag.connector.scheduler.pace import Pace
from semkv_rag.connector.scheduler.request_blocks import NO_ROOM, RequestBlocks
from semkv_rag.connector.scheduler.step_work import StepWork
from semkv_rag.connector.scheduler.tracked import TrackedRequest, first_report
from semkv_rag.errors import OptionError, StoreError
from semkv_rag.reuse import Conversations, Span, first_to_compute, make_plan
from semkv_rag.wire import ANSWER_TOKENS_KEY, CAPTURE_KEY, NEAR_IMAGES_KEY, STORE_IMAGES_KEY

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

AT_ONCE_S = 0.02
"""The scheduler waits this long for a look-up, and all requests with it. Most are done by then."""
PATIENCE_S = 10.0
"""The request itself waits this long; then it is computed."""


class RequestPlanner:
    """Plans each request; one per engine.

    Args:
        catalogue: the store's chunks; None when the store could not be opened, see `store_fault`.
        owners: whose chunks are a request's.
        defaults: the options of requests that bring none.
        blocks: of requests.
        block_size: tokens of a block, as they are hashed.
        step_tokens: the most that a step computes.
        steps_at_once: so many steps are under way at most.
        request_namespace: whether a request may name its own namespace. Only where whoever sends
            requests has been checked before.
        images: what is done with them.
        store_fault: in words, why there is no catalogue.
    """

    def __init__(
        self,
        catalogue: Catalogue | None,
        *,
        owners: Owners,
        blocks: RequestBlocks,
        defaults: ReuseOptions,
        block_size: int,
        step_tokens: int,
        steps_at_once: int,
        request_namespace: bool,
        images: ImageRules,
        store_fault: str | None = None,
    ) -> None:
        self.gate = GateReport(False, "the workers have not reported yet")
        self.stats = ReuseStats()
        self.pace = Pace()
        self.blocks = blocks
        self._catalogue, self._owners = catalogue, owners
        self._defaults = defaults
        self._block_size = block_size
        self._step_work = StepWork(block_size, step_tokens, steps_at_once, blocks)
        self._request_namespace = request_namespace
        self._images = images
        self._store_fault = store_fault
        self._conversations = Conversations()
        self._requests: dict[str, TrackedRequest] = {}
        self._planned: list[TrackedRequest] = []  # since the last step
        self._blends: list[BlendTask] = []
        self._under_way: dict[bytes, str] = {}  # whose blend it is, by its key
        self._stalls_s: list[float] = []  # since a request was counted

    def close(self) -> None:
        """Called once, at shutdown."""
        if self._catalogue is not None:
            self._catalogue.close()

    def new_request(self, request: Request) -> None:
        """Plan the request's reuse; nothing that goes wrong here may fail it."""
        try:
            self._admit(request)
        except Exception as error:
            self._give_up(request, error)

    def _give_up(self, request: Request, error: Exception) -> None:
        """Have a request computed, because of a fault of ours."""
        logger.error("A request could not be planned; it is computed", exc_info=error)
        report = first_report(request, self._defaults, f"planning failed: {error!r}")
        self._requests[request.request_id] = TrackedRequest(
            request, self._defaults, report, Owner(""), fault="internal", plain_reason="fault"
        )

    def _admit(self, request: Request) -> None:
        params, skip = wishes_in(request, any_namespace=self._request_namespace)
        capture = params.pop(CAPTURE_KEY, None)
        near = params.pop(NEAR_IMAGES_KEY, {})
        store_images = bool(params.pop(STORE_IMAGES_KEY, False))
        answer = int(params.pop(ANSWER_TOKENS_KEY, 0))
        try:
            options = ReuseOptions.from_mapping(params, self._defaults)
        except OptionError as error:
            options, skip = self._defaults, str(error)
        tracked = TrackedRequest(
            request,
            options,
            first_report(request, options),
            self._owners.of(request),
            answer_tokens=answer,
            capture=capture,
        )
        self._requests[request.request_id] = tracked
        if skip is None and options.enabled and request.mm_features:
            tracked.names = note_images(tracked, self._images, near, store=store_images)
            if not all(image.from_store for image in tracked.images):
                tracked.capture = None
        plain_reason: PlainReason = "request" if options.enabled else "off"
        skip = skip or obstacle(tracked, self._images) or tracked.owner.obstacle
        if skip is None:
            skip, plain_reason = self._obstacle(), "store" if self.gate.servable else "model"
        if skip is not None:
            tracked.plain_reason = plain_reason
            tracked.report = replace(tracked.report, reason=skip)
            self._settle(tracked)
            return
        assert self._catalogue is not None
        tracked.since = time.perf_counter()
        tracked.look_up = self._catalogue.find(
            tracked.owner.model, options.namespace, tracked.matchable()
        )
        wait([tracked.look_up], AT_ONCE_S)
        self._try_to_plan(tracked)

    def _try_to_plan(self, tracked: TrackedRequest) -> None:
        """Plan a request whose look-up is under way, if that is done or has taken too long."""
        look_up, waits_s = tracked.look_up, time.perf_counter() - tracked.since
        if look_up is None or not (look_up.done() or waits_s > PATIENCE_S):
            return
        tracked.look_up = None
        try:
            self._plan(tracked, look_up)
            self._settle(tracked)
        except Exception as error:
            self._give_up(tracked.request, error)

    def _settle(self, tracked: TrackedRequest) -> None:
        """Do what follows from a request's plan, or from its having none."""
        capture, plan = tracked.capture, tracked.plan
        if capture is not None and capture.get("in_passing"):
            # What is computed behind reused KV is the prompt's own only where that is exact.
            own = plan is None or (capture["behind_exact"] and plan.is_exact_prompt_prefix)
            if tracked.report.kv_cache == "skip" or not own:
                tracked.capture = None
        if plan is not None:
            self._planned.append(tracked)
        salt_blocks(tracked.request, tracked.salts(self._block_size))
        # Behind the hashing, which an image's name is part of.
        for feature, name in zip(tracked.request.mm_features, tracked.names, strict=False):
            feature.identifier = name

    def _obstacle(self) -> str | None:
        """Why no request is served with reuse, in words, or None."""
        if not self.gate.servable:
            return f"this model cannot be served with reuse: {self.gate.reason}"
        if self._catalogue is None:
            return f"the store cannot be used: {self._store_fault}"
        return None

    def _plan(self, tracked: TrackedRequest, look_up: Future[list[Span]]) -> None:
        assert self._catalogue is not None
        reason = "no stored chunk was found in the prompt"
        tracked.plain_reason = "no_chunk"
        try:
            if not look_up.done():
                look_up.cancel()
                raise StoreError(f"it did not answer within {PATIENCE_S} s")
            spans = look_up.result(0)
            self._catalogue.used(spans)
            prompt = tracked.matchable()
            end = first_to_compute(spans, tracked.images)
            plan = make_plan(spans, len(prompt), tracked.options, end)
            if spans and end is not None and end <= spans[0].dst:
                reason = self._images.why_not_behind
            sooner = None if plan is None else self.pace.why_not(plan)
            if plan is not None and sooner is None:
                tracked.plan = self._conversations.with_earlier_question(
                    plan.asking(prompt), prompt
                )
            if sooner is not None:
                reason, tracked.plain_reason = sooner, "slower"
        except StoreError as error:
            reason = f"the store's index cannot be read: {error}"
            tracked.fault, tracked.plain_reason = "index", "fault"
        except Exception as error:
            logger.exception("Matching failed; the request is computed")
            reason = f"matching failed: {error!r}"
            tracked.fault, tracked.plain_reason = "internal", "fault"
        tracked.note_plan(reason, time.perf_counter() - tracked.since)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """How many tokens behind the first `computed` ones the blend pass will fill in.

        Returns:
            None where it is not known yet: vLLM asks again at its next step.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.look_up is not None:
            self._try_to_plan(tracked)
            # Planned or not: `computed` was found by hashes that the plan may have changed.
            return None
        if self.blocks.windowed and tracked.finds_its_chunk(computed):
            salt_blocks(request, tracked.chunk_afresh(self._block_size))
            return None
        tracked.in_prefix_cache = computed
        if tracked.plan is None or tracked.plan.covered <= computed:
            return 0
        if self._under_way.get(tracked.blend_key, request.request_id) != request.request_id:
            return None
        room = self.blocks.may_blend(request)
        if room is False:
            tracked.take(BlendResult(request.request_id, None, NO_ROOM))
            return 0
        if room is None:
            return None
        return tracked.plan.covered - computed

    def allocated(self, request: Request, block_ids: Blocks, external: int) -> None:
        """Note the blend of a request that got its blocks, if there is one."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if request.num_preemptions == 0:
            tracked.report = replace(tracked.report, cached_tokens=tracked.in_prefix_cache)
        if external > 0:
            assert tracked.plan is not None
            start = tracked.plan.covered - external
            task = tracked.blend_task(block_ids, start, self._images.lookup)
            tracked.blend = self.blocks.lend(request, task)
            self._blends.append(tracked.blend)
            self._under_way[tracked.blend_key] = request.request_id

    def step(self, scheduled: Mapping[str, tuple[int, int]]) -> StepMetadata:
        """The work of the coming step; called once, after its requests were scheduled.

        Args:
            scheduled: what its forward computes, see `scheduled_ranges`.
        """
        # vLLM does not ask for those that wait while it is full, and their chunks are to be read ahead.
        for tracked in [one for one in self._requests.values() if one.look_up is not None]:
            self._try_to_plan(tracked)
        self.pace.step_began(sum(end - begin for begin, end in scheduled.values()))
        planned, self._planned = self._planned, []
        blends, self._blends = self._blends, []
        return self._step_work.metadata(planned, blends, scheduled, self._requests)

    def results(self, results: WorkerResults) -> None:
        """Take a step's outcome into the reports; chunks with bad files are matched no more."""
        if results.stall_s is not None:
            self._stalls_s.append(results.stall_s)
        self._owners.loaded(results.adapters)
        for request_id, result in results.blends.items():
            if (tracked := self._requests.get(request_id)) is None:
                continue
            if result.bad_chunks and self._catalogue is not None:
                model, namespace = tracked.owner.model, tracked.options.namespace
                self._catalogue.forget(model, namespace, result.bad_chunks)
            self._ended(request_id)
            tracked.take(result)
            if result.stats is not None:
                stored = tracked.loaded_tokens + result.stats.recomputed
                self.pace.loaded(stored, result.stats.load_ms)

    def _ended(self, request_id: str) -> None:
        """Let those be blended that waited for this one's blend."""
        self._under_way = {key: one for key, one in self._under_way.items() if one != request_id}

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The answer's `kv_transfer_params`: the report, and whether the request was captured.

        Returns:
            None for a request that was never seen.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.look_up is not None:
            tracked.look_up.cancel()
        self._ended(request.request_id)
        self.blocks.ended(request.request_id)
        report, counts = tracked.final_report(), tracked.counts(self._stalls_s)
        if counts is not None:
            self.stats.count(report, **counts)
            self._stalls_s = []
        return tracked.answer(report, counts)
