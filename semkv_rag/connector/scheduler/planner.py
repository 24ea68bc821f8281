"""The scheduler's half of the connector: what is reused by which request, and where it goes.

Called from vLLM's scheduler, all in one thread. For each request, in this order:

* `new_request` once, when it arrives: its options are read, stored chunks are looked for in its prompt,
  the plan is made, and the hashes of the blocks that the plan makes inexact are salted.
* `matched_tokens` whenever it is about to be scheduled, again after a preemption. Where the look-up was
  not done in time for `new_request`, the plan is made here, and vLLM asks again meanwhile: it serves
  others. Planned once, a request is planned for good.
* `allocated` when it got its blocks: the blend of the coming step is noted.
* `step` once for every step: the work of the workers.
* `results` when a step's outcome is known.
* `finished` once: the report.

**Prefix caching stays exact.** vLLM finds a cached block by a hash over its tokens and all before it.
Blocks that hold blended KV must not be found by a request that did not ask for the same blend, so the
plan's digest goes into the hash of the block with the first inexact token, and with that into all behind
it, those that fill up while the answer is decoded included (`block_hashes`). Blocks before it are shared
with ordinary requests of the namespace. Namespaces are kept apart by vLLM's `cache_salt`, which a request
has when it arrives here (`reporting`).

**A block that is found may not be filled yet.** vLLM shares a block from the moment it is scheduled.
For its own forward that is soon enough, but a blend runs before the forward: blocks that the same
step's forward fills are therefore computed by the blend too.

**Images.** An image's placeholders are matched by what it shows (see `reuse.images`). Its KV is used
where all before it is the same as well; a plan ends before the first image of which that is not true.
The features of images come from the store under names that are given here (see `fusion_ids`). Where an
image is taken for a stored one that looks like it, all of this follows the stored one, and the blocks
from there on are that request's alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semkv_rag.config import AUTO, ReuseOptions
from semkv_rag.connector.images.identifiers import state_identifier
from semkv_rag.connector.images.image_report import take_fusion_report
from semkv_rag.connector.images.places import rows_of
from semkv_rag.connector.messages import (
    BlendResult,
    BlendTask,
    CaptureTask,
    GateReport,
    StepMetadata,
)
from semkv_rag.connector.scheduler.block_hashes import salt_blocks
from semkv_rag.connector.scheduler.catalogue import Catalogue
from semkv_rag.errors import OptionError, StoreError
from semkv_rag.report import ReuseReport
from semkv_rag.reuse import (
    Conversations,
    ImageRows,
    ReusePlan,
    Span,
    TokenArray,
    first_to_compute,
    image_key,
    make_plan,
    tell_images_apart,
    token_array,
)
from semkv_rag.wire import (
    ANSWER_TOKENS_KEY,
    CAPTURE_KEY,
    CAPTURED_KEY,
    NEAR_IMAGES_KEY,
    OURS_ALONE,
    PARAMS_KEY,
    STORE_IMAGES_KEY,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


AT_ONCE_S = 0.02
"""The scheduler waits this long for a look-up, and all requests with it. Most are done by then."""
PATIENCE_S = 10.0
"""The request itself waits this long; then it is computed."""


@dataclass
class _Tracked:
    """One live request.

    Attributes:
        options: its own.
        look_up: what is stored of its prompt, until the plan is made; `since` when it began.
        images: in prompt order, each under the key it is taken for.
        names: of the images' features, as they are loaded and saved; given to the request with the plan.
        first_near: where the first image stands that is taken for another one.
        answer: tokens at the prompt's end that are an answer to it.
        capture: the wish that the prompt be captured; `captured` once the workers were told.
    """

    request: Request
    options: ReuseOptions
    report: ReuseReport
    look_up: Future[list[Span]] | None = None
    since: float = 0.0
    images: list[ImageRows] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    first_near: int | None = None
    answer: int = 0
    plan: ReusePlan | None = None
    capture: Mapping[str, Any] | None = None
    captured: bool = False
    in_prefix_cache: int = 0

    def tokens(self) -> TokenArray:
        """The prompt's tokens as they are matched and stored."""
        return tell_images_apart(token_array(self.request.prompt_token_ids), self.images)

    def matchable(self) -> TokenArray:
        """Those of them in which chunks are looked for."""
        tokens = self.tokens()
        return tokens[: len(tokens) - self.answer]


class RequestPlanner:
    """One per engine.

    Args:
        catalogue: the store's chunks; None when the store could not be opened, see `store_fault`.
        model: the model's fingerprint.
        defaults: the options of requests that bring none.
        block_size: tokens of a block, as they are hashed.
        request_namespace: whether a request may name its own namespace. Only where whoever sends
            requests has been checked before.
        fusion: whether the features of images are stored.
        image_obstacle: in words, why KV is not reused in prompts with images, or None.
        store_fault: in words, why there is no catalogue.
    """

    def __init__(
        self,
        catalogue: Catalogue | None,
        *,
        model: str,
        defaults: ReuseOptions,
        block_size: int,
        request_namespace: bool,
        fusion: bool = False,
        image_obstacle: str | None = None,
        store_fault: str | None = None,
    ) -> None:
        self.gate = GateReport(False, "the workers have not reported yet")
        self.kv_cache_manager: KVCacheManager | None = None
        self._catalogue = catalogue
        self._model = model
        self._defaults = defaults
        self._block_size = block_size
        self._request_namespace = request_namespace
        self._fusion = fusion
        self._image_obstacle = image_obstacle
        self._store_fault = store_fault
        self._conversations = Conversations()
        self._requests: dict[str, _Tracked] = {}
        self._blends: list[BlendTask] = []

    def close(self) -> None:
        """Called once, at shutdown."""
        if self._catalogue is not None:
            self._catalogue.close()

    # ---- a request's life ------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Plan the request's reuse; nothing that goes wrong here may fail it."""
        try:
            self._take(request)
        except Exception as error:
            self._give_up(request, error)

    def _give_up(self, request: Request, error: Exception) -> None:
        """Have a request computed, because of a fault of ours."""
        logger.error("A request could not be planned; it is computed", exc_info=error)
        report = ReuseReport(
            kv_cache="skip",
            prompt_tokens=request.num_prompt_tokens,
            reason=f"planning failed: {error!r}",
        )
        self._requests[request.request_id] = _Tracked(request, self._defaults, report)

    def _take(self, request: Request) -> None:
        params, skip = self._params(request)
        capture = params.pop(CAPTURE_KEY, None)
        near = params.pop(NEAR_IMAGES_KEY, {})
        store_images = bool(params.pop(STORE_IMAGES_KEY, False))
        answer = int(params.pop(ANSWER_TOKENS_KEY, 0))
        try:
            options = ReuseOptions.from_mapping(params, self._defaults)
        except OptionError as error:
            options, skip = self._defaults, str(error)
        tracked = _Tracked(
            request,
            options,
            ReuseReport(
                kv_cache="skip",
                prompt_tokens=request.num_prompt_tokens,
                ratio=0.0 if options.ratio == AUTO else options.ratio,
                selector=options.selector,
            ),
            answer=answer,
            capture=capture,
        )
        self._requests[request.request_id] = tracked
        if skip is None and options.enabled and request.mm_features:
            tracked.names = self._see_images(tracked, near, store=store_images)
        skip = skip or self._obstacle(request, options, capture)
        if skip is not None:
            tracked.report = replace(tracked.report, reason=skip)
            self._settle(tracked)
            return
        assert self._catalogue is not None
        tracked.since = time.perf_counter()
        tracked.look_up = self._catalogue.find(options.namespace, tracked.matchable())
        wait([tracked.look_up], AT_ONCE_S)
        self._try_to_plan(tracked, tracked.look_up)

    def _try_to_plan(self, tracked: _Tracked, look_up: Future[list[Span]]) -> None:
        """Plan a request if its look-up is done, or has taken too long."""
        if look_up.done() or time.perf_counter() - tracked.since > PATIENCE_S:
            tracked.look_up = None
            self._plan(tracked, look_up)
            self._settle(tracked)

    def _settle(self, tracked: _Tracked) -> None:
        """Do what follows from a request's plan, or from its having none."""
        capture, plan = tracked.capture, tracked.plan
        if capture is not None and capture.get("in_passing"):
            # What is computed behind reused KV is the prompt's own only where that is exact.
            own = plan is None or (capture["behind_exact"] and plan.is_exact_head)
            if tracked.report.kv_cache == "skip" or not own:
                tracked.capture = None
        self._salt_blocks(tracked)
        # Behind the hashing, which an image's name is part of.
        for feature, name in zip(tracked.request.mm_features, tracked.names, strict=False):
            feature.identifier = name

    def _params(self, request: Request) -> tuple[dict[str, Any], str | None]:
        """Our part of a request's `kv_transfer_params`, and why it is served plainly, or None.

        Whatever stands there: a request is checked before it comes here, but nothing that comes here may
        stop the engine.
        """
        transfer = request.kv_transfer_params
        given = transfer.get(PARAMS_KEY) if isinstance(transfer, dict) else None
        if not self._request_namespace:
            known = given if isinstance(given, dict) else {}
            return {name: known[name] for name in known if name not in OURS_ALONE}, None
        if not isinstance(given, dict) or "namespace" not in given:
            return {}, "the request has no namespace"
        return dict(given), None

    def _see_images(self, tracked: _Tracked, near: Mapping[str, str], *, store: bool) -> list[str]:
        """Note a request's images; the names by which their features may be loaded and saved.

        Args:
            near: the keys of images that are taken for another one, and of that one.
            store: whether features that are computed are saved.

        Returns:
            One for each image and the like, in the prompt's order; none where no features are stored.
        """
        names = []
        for feature in tracked.request.mm_features:
            # Not its identifier: that is the namespace's own, and a copy's (for another answer to the
            # same request) is one of ours already.
            key = image_key(feature.mm_hash or feature.identifier)
            donor = near.get(key) if self._fusion else None
            if donor is not None and tracked.first_near is None:
                tracked.first_near = feature.mm_position.offset
            tracked.images.append(rows_of(donor or key, feature.mm_position))
            if self._fusion:
                names.append(state_identifier(tracked.options.namespace, key, donor, save=store))
        return names

    def _obstacle(
        self, request: Request, options: ReuseOptions, capture: Mapping[str, Any] | None
    ) -> str | None:
        """Why this request is served plainly, in words, or None."""
        if capture is not None and not capture.get("in_passing"):
            return "the request captures a chunk"
        if not options.enabled:
            return "reuse was switched off for this request"
        if not self.gate.servable:
            return f"this model cannot be served with reuse: {self.gate.reason}"
        if self._catalogue is None:
            return f"the store cannot be used: {self._store_fault}"
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "the prompt is not made of tokens"
        if request.mm_features and self._image_obstacle is not None:
            return f"the prompt holds images, and {self._image_obstacle}"
        if request.lora_request is not None:
            return "the request uses a LoRA adapter"
        if request.skip_reading_prefix_cache:
            return "the request asked for all prompt tokens to be computed"
        return None

    def _plan(self, tracked: _Tracked, look_up: Future[list[Span]]) -> None:
        assert self._catalogue is not None
        reason: str | None = "no stored chunk was found in the prompt"
        try:
            if not look_up.done():
                look_up.cancel()
                raise StoreError(f"it did not answer within {PATIENCE_S} s")
            spans = look_up.result(0)
            self._catalogue.used(spans)
            prompt = tracked.matchable()
            end = first_to_compute(spans, tracked.images)
            plan = make_plan(spans, len(prompt), tracked.options, end)
            if plan is not None:
                tracked.plan = self._conversations.carry_on(plan.asking(prompt), prompt)
        except StoreError as error:
            reason = f"the store's index cannot be read: {error}"
        except Exception as error:
            logger.exception("Matching failed; the request is computed")
            reason = f"matching failed: {error!r}"
        plan = tracked.plan
        tracked.report = replace(
            tracked.report,
            kv_cache="miss" if plan is None else "hit",
            exact_tokens=plan.exact_tokens if plan else 0,
            reused_tokens=plan.reused_tokens if plan else 0,
            chunk_ids=tuple(span.chunk_id for span in plan.spans) if plan else (),
            match_ms=round((time.perf_counter() - tracked.since) * 1000, 3),
            reason=reason if plan is None else None,
        )

    def _salt_blocks(self, tracked: _Tracked) -> None:
        """Have the blocks whose KV is not the tokens' own found by requests of the same plan only."""
        salts: dict[int, bytes] = {}
        if tracked.first_near is not None:
            taken_for = "".join(image.key for image in tracked.images)
            salts[tracked.first_near // self._block_size] = b"near:" + taken_for.encode()
        if tracked.plan is not None and (first := tracked.plan.first_inexact) is not None:
            block = first // self._block_size
            salts[block] = salts.get(block, b"") + b"plan:" + tracked.plan.digest()
        salt_blocks(tracked.request, salts)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """How many tokens behind the first `computed` ones the blend pass will fill in.

        Returns:
            None where it is not known yet: vLLM asks again at its next step.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.look_up is not None:
            try:
                self._try_to_plan(tracked, tracked.look_up)
            except Exception as error:
                self._give_up(request, error)
            # Planned or not: `computed` was found by hashes that the plan may have changed.
            return None
        tracked.in_prefix_cache = computed
        return 0 if tracked.plan is None else max(tracked.plan.covered - computed, 0)

    def allocated(self, request: Request, block_ids: list[int], external: int) -> None:
        """Note the blend of a request that got its blocks, if there is one."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if request.num_preemptions == 0:
            tracked.report = replace(tracked.report, cached_tokens=tracked.in_prefix_cache)
        if external > 0:
            assert tracked.plan is not None
            covered = tracked.plan.covered
            self._blends.append(
                BlendTask(
                    request_id=request.request_id,
                    plan=tracked.plan,
                    tokens=list(request.prompt_token_ids[:covered]),
                    block_ids=block_ids,
                    start=covered - external,
                    images=any(image.positions[0] < covered for image in tracked.images),
                )
            )

    # ---- a step ----------------------------------------------------------------------------

    def step(self, scheduled: Mapping[str, tuple[int, int]]) -> StepMetadata:
        """The work of the coming step; called once, after its requests were scheduled.

        Args:
            scheduled: what its forward computes, see `scheduled_ranges`.
        """
        metadata = StepMetadata(self._model)
        if self._blends:
            filled = self._filled_by_forward(scheduled)
            for task in self._blends:
                start = self._first_unfilled(task, filled)
                end = scheduled.get(task.request_id, (0, 0))[1]
                metadata.blends.append(replace(task, start=start, end=end))
            self._blends = []
        for request_id, (_, end) in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.capture is None or tracked.captured:
                continue
            if end >= tracked.request.num_prompt_tokens:
                metadata.captures.append(self._capture_task(tracked, tracked.capture))
                tracked.captured = True
        return metadata

    def _filled_by_forward(self, scheduled: Mapping[str, tuple[int, int]]) -> set[int]:
        """The blocks that this step's own forward writes to."""
        filled: set[int] = set()
        for request_id, (begin, end) in scheduled.items():
            blocks = self._block_ids(request_id)
            filled.update(blocks[begin // self._block_size : -(-end // self._block_size)])
        return filled

    def _first_unfilled(self, task: BlendTask, filled: set[int]) -> int:
        """Where the blend must start so that everything before is in the cache by then."""
        own = task.block_ids[: task.start // self._block_size]
        shared = [index for index, block in enumerate(own) if block in filled]
        return shared[0] * self._block_size if shared else task.start

    def _capture_task(self, tracked: _Tracked, capture: Mapping[str, Any]) -> CaptureTask:
        request, context = tracked.request, int(capture["context"])
        blocks = self._block_ids(request.request_id)
        end = -(-request.num_prompt_tokens // self._block_size)
        return CaptureTask(
            ticket=capture["ticket"],
            chunk_id=capture["id"],
            namespace=tracked.options.namespace,
            kind=capture["kind"],
            tokens=tracked.tokens().tolist(),
            context=context,
            block_ids=blocks[context // self._block_size : end],
            role=capture.get("role", "stored"),
        )

    def _block_ids(self, request_id: str) -> list[int]:
        assert self.kv_cache_manager is not None
        return list(self.kv_cache_manager.get_block_ids(request_id)[0])

    def results(self, blends: Mapping[str, BlendResult]) -> None:
        """Take a step's outcome into the reports; chunks with bad files are matched no more."""
        for request_id, result in blends.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if result.bad_chunks and self._catalogue is not None:
                self._catalogue.forget(tracked.options.namespace, result.bad_chunks)
            if result.stats is None:
                tracked.report = replace(
                    tracked.report,
                    kv_cache="miss",
                    exact_tokens=0,
                    reused_tokens=0,
                    recomputed_tokens=0,
                    chunk_ids=(),
                    reason=result.error,
                )
            else:
                report, stats = tracked.report, result.stats
                if tracked.options.ratio == AUTO and report.reused_tokens:
                    spent = round(stats.recomputed / report.reused_tokens, 4)
                    report = replace(report, ratio=spent, reason=stats.note)
                tracked.report = replace(
                    report,
                    risk=None if stats.risk is None else round(stats.risk, 5),
                    recomputed_tokens=result.stats.recomputed,
                    charged_ratio=round(result.stats.charged_ratio, 4),
                    load_ms=round(result.stats.load_ms, 3),
                    blend_ms=round(result.stats.blend_ms, 3),
                )

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
        # An aborted request may have blends that no step will run.
        self._blends = [task for task in self._blends if task.request_id != request.request_id]
        report = replace(tracked.report, preemptions=request.num_preemptions)
        fusion = take_fusion_report(request.request_id)
        if fusion is not None:
            report = report.with_images(
                fusion.loaded, fusion.computed, fusion.mapped, fusion.reason
            )
        answer: dict[str, Any] = {PARAMS_KEY: report.to_mapping()}
        if tracked.captured:
            answer[CAPTURED_KEY] = True
        return answer


def scheduled_ranges(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """The token positions that the coming forward computes, [begin, end), by request."""
    begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        request_id: (begin, begin + output.num_scheduled_tokens[request_id])
        for request_id, begin in begins.items()
    }
