"""The worker's half of the connector: blends and captures, behind a step's forward.

`bind` is called once, when the model and its paged cache are there; it runs the gate. Then, once for
every step: `begin_step` before anything else, `blend` behind the forward, `end_step` behind both, then
`take_ended`, `take_failed_blocks` and `take_results`.

A fault of the store, or of ours, never fails a request: its blocks are named to vLLM, which computes its
tokens, and the reason goes to its report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vllm.config import VllmConfig

from semkv_rag.connector.capture_results import CaptureTeller
from semkv_rag.connector.messages import (
    BlendResult,
    BlendTask,
    Captured,
    FirstForward,
    GateReport,
    StepMetadata,
    WorkerResults,
)
from semkv_rag.connector.threads import beside_model
from semkv_rag.connector.worker.blend.blend_pass import BlendPass
from semkv_rag.connector.worker.blend.blend_queue import BlendQueue
from semkv_rag.connector.worker.blend.layer_reader import LoadingThreads
from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.blend.stored_kv import LostKV, LostSources, Sources
from semkv_rag.connector.worker.capture.capture import ChunkCapture
from semkv_rag.connector.worker.capture.lull import Lull
from semkv_rag.connector.worker.chunk_files import ChunkFiles
from semkv_rag.connector.worker.chunk_memory import made_chunk_memory
from semkv_rag.connector.worker.gate import agreed, run_gate, why_not
from semkv_rag.connector.worker.load_check import checked_loading
from semkv_rag.connector.worker.model.adapters import Adapters
from semkv_rag.connector.worker.model.draft_kv import DraftKV
from semkv_rag.connector.worker.model.row_attention import RowAttention
from semkv_rag.connector.worker.model.sliced_model import Attention
from semkv_rag.connector.worker.model.taken_model import take_model
from semkv_rag.connector.worker.probe.probes import PROBES, Bench, Found
from semkv_rag.connector.worker.reading_ahead import ReadingAhead
from semkv_rag.connector.worker.spoiling import NO_NUMBERS, Spoiling
from semkv_rag.store.objects.shared_files import files_of
from semkv_rag.store.place import StorePlace

logger = logging.getLogger(__name__)

OTHER_WEIGHTS = "the model's weights were given up in a sleep: start the engine anew to reuse KV"


@dataclass
class Failed:
    """What vLLM has to compute: blocks, or whole requests where blocks are in several groups."""

    blocks: set[int] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)


class BlendExecutor:
    """The worker's half of the connector; one per worker.

    Args:
        place: where the store is.
        ram_bytes: what chunks may take in memory, of all ranks together; 0 for none.
        codec: by which chunks are written.
        teller: of what became of captures.
    """

    def __init__(
        self,
        config: VllmConfig,
        place: StorePlace,
        ram_bytes: int,
        codec: str,
        teller: CaptureTeller,
    ) -> None:
        self.gate = GateReport(
            False, "the model was not handed over: set worker_cls to SemKVWorker"
        )
        self._config = config
        self._place, self._ram_bytes = place, ram_bytes
        self._blend_pass: BlendPass | None = None
        self._files: ChunkFiles | None = None
        self._ahead: ReadingAhead | None = None
        self._queue: BlendQueue | None = None
        self._capture: ChunkCapture | None = None
        self._spoiling: Spoiling | None = None
        self._adapters: Adapters | None = None
        self._lull = Lull()
        self._make_capture = partial(ChunkCapture, lull=self._lull, teller=teller, codec=codec)
        self._step: StepMetadata | None = None
        self._put_off: StepMetadata | None = None
        self._results: dict[str, BlendResult] = {}
        self._failed = Failed()
        self._ended: set[str] = set()
        self._other_weights = False
        self._stall_s: float | None = None

    def bind(self, runner: Any) -> None:
        """Take the model runner, whose paged cache is allocated, and pass the gate."""
        reason = agreed(why_not(partial(self._take_runner, runner)), runner.device)
        if reason is None:
            reason = why_not(partial(self._pass_gate, runner))
        if reason is not None:
            self.gate = GateReport(False, reason)
        if not self.gate.servable:
            logger.warning("semkv: this model is answered without reuse: %s", self.gate.reason)

    def _take_runner(self, runner: Any) -> None:
        """Make all parts, of the runner's model and cache.

        Raises:
            Unservable: they cannot be served with reuse.
        """
        model, layouts = take_model(runner, self._config)
        ranks, paged = model.ranks, model.paged
        self._adapters = model.adapters
        self._blend_pass = BlendPass(
            BlendSetting(
                model=model,
                piece_tokens=self._config.scheduler_config.max_num_batched_tokens,
                layouts=layouts,
                loading=LoadingThreads(runner.device),
            )
        )
        memory = made_chunk_memory(self._ram_bytes // ranks.count, runner.device)
        shapes = [layer.kv_shapes for layer in model.layers]
        files = files_of(self._place, beside_model)
        self._files = ChunkFiles(files, ranks.rank, shapes, memory)
        has_ahead = memory is not None or self._place.objects is not None
        self._ahead = ReadingAhead(self._files) if has_ahead else None
        draft_kv = DraftKV(runner, self._config, model.layers, paged)
        self._queue = BlendQueue(self._blend_pass, self._open, draft_kv)
        self._spoiling = Spoiling(paged, layouts)
        self._capture = self._make_capture(
            files, paged, layouts, ranks.rank, ranks.count, adapters=self._adapters
        )

    def _pass_gate(self, runner: Any) -> None:
        """Pass the gate with the kernel for scattered rows; where it does not run, or is not right, with
        the backend's own attention."""
        assert self._blend_pass is not None
        blend_pass = self._blend_pass
        model = blend_pass.setting.model
        attentions: list[Attention] = [model.attention]
        try:
            rows = RowAttention(model.layers, blend_pass.setting.layouts, model.paged)
            attentions.insert(0, rows)
        except NotImplementedError as reason:
            logger.debug("semkv: the backend attends to scattered tokens: %s", reason)
        for model.attention in attentions:
            try:
                gate = run_gate(
                    blend_pass,
                    vocabulary=self._config.model_config.get_vocab_size(),
                    block_size=model.paged.block_size,
                    blocks=runner.kv_cache_config.num_blocks,
                    dtype=runner.dtype,
                )
            except Exception as fault:
                logger.exception("The gate failed")
                gate = GateReport(False, f"the gate failed: {fault!r}")
            if gate.servable:
                blocks = runner.kv_cache_config.num_blocks
                model.loading = checked_loading(blend_pass.setting, blocks, runner.dtype)
                break
        self.gate = gate

    # ---- a step ----------------------------------------------------------------------------

    def begin_step(self, metadata: StepMetadata) -> None:
        self._step = metadata
        self._lull.step()
        if self._ahead is not None:
            self._ahead.stop({task.request_id for task in metadata.blends})
            self._ahead.begin(metadata.ahead)

    def blend(self) -> None:
        """Let the step's blends begin, and those under way go on; in a pipeline, put that off."""
        if self._config.parallel_config.pipeline_parallel_size > 1:
            self._put_off = self._step
        elif self._step is not None:
            self._blend(self._step)

    def blend_behind_step(self) -> None:
        """Called when a step's hidden states are on their way to the next stage: do what was put off.

        A stage that blended before would wait for the next one, which waits for them. So what ends here
        is told with the next step.
        """
        step, self._put_off = self._put_off, None
        if step is not None:
            self._blend(step)

    def _blend(self, step: StepMetadata) -> None:
        if self._queue is not None and self._files is not None:
            self._files.need([*self._queue.loading, *step.blends])
            self._queue.begin(step.blends)
            began = time.perf_counter()
            self._queue.advance(step.budget_tokens, idle=step.idle)
            if self._queue.computed and not step.idle and self._files.rank == 0:
                self._stall_s = time.perf_counter() - began
            self._take(self._queue)

    def end_step(self) -> None:
        if self._step is not None and self._step.first_forwards:
            self._refuse_what_is_no_number(self._step.first_forwards)
        if self._step is not None and self._step.captures and self._capture is not None:
            if self._other_weights:
                self._capture.refuse(self._step.captures, OTHER_WEIGHTS)
            else:
                self._capture.keep(self._step.captures, self._failed.blocks)
        if self._adapters is not None:
            self._adapters.end_step()
        self._lull.step()
        self._step = None

    def sleep(self, *, weights_go: bool) -> None:
        """Called before vLLM gives up the memory of the paged cache, while no step runs.

        No thread of ours writes there any more behind this. What captures have copied is their own.

        Args:
            weights_go: the weights go too. What comes in their place may be another model's, whose KV is
                not the stored one.
        """
        if weights_go:
            self._other_weights = True
        if self._queue is not None and self._blend_pass is not None:
            self._queue.give_up("the engine was put to sleep")
            self._take(self._queue)
            self._blend_pass.picked.clear()

    @property
    def _whole(self) -> bool:
        """Whether vLLM is told of blocks that hold nothing of use, or else of requests."""
        assert self._blend_pass is not None
        return self._blend_pass.setting.model.paged.whole

    def _open(self, task: BlendTask) -> Sources:
        if self._other_weights:
            raise LostKV(OTHER_WEIGHTS)
        if task.no_room is not None:
            raise LostKV(task.no_room, fault=None)
        assert self._files is not None
        if task.adapter is not None:
            assert self._adapters is not None
            if fault := self._adapters.fault(task.adapter):
                # Not at once: all ranks have to agree on it.
                return LostSources(fault)
        return self._files.open_for(task)

    def _take(self, queue: BlendQueue) -> None:
        """Take the outcome of the blends that ended."""
        for request_id, result in queue.results.items():
            self._results[request_id] = result
            if result.stats is not None and self._files is not None:
                stats = self._files.with_origin(request_id, result.stats)
                self._results[request_id] = replace(result, stats=stats)
        self._ended.update(queue.results)
        queue.results.clear()
        block_size = self._config.cache_config.block_size
        for task in queue.failed:
            if not self._whole:
                self._failed.requests.add(task.request_id)
                continue
            # vLLM begins at the first token that was to be filled in.
            last = -(-task.plan.covered // block_size)
            self._failed.blocks.update(task.block_ids[0][task.start // block_size : last])
        queue.failed.clear()

    def _refuse_what_is_no_number(self, forwards: Sequence[FirstForward]) -> None:
        """Have vLLM compute the requests whose KV has become NaN or infinite, and leave none of it.

        Where blocks are in several groups vLLM takes no request back that runs: a blend looks itself.
        """
        if self._spoiling is None or not self._whole:
            return
        for one in self._spoiling.find(forwards):
            logger.warning("Stored KV gives no numbers; the request is computed")
            self._failed.blocks.update(self._spoiling.clear(one))
            self._results[one.request_id] = BlendResult(
                one.request_id, None, NO_NUMBERS, one.chunk_ids, fault="not_finite"
            )

    # ---- what others ask for ---------------------------------------------------------------

    def take_results(self) -> WorkerResults | None:
        """The blends that ended since the last call, and how long blends held up the step, if either."""
        results, stall_s = self._results, self._stall_s
        self._results, self._stall_s = {}, None
        loaded = {} if self._adapters is None else self._adapters.take_loaded()
        if not (results or loaded or stall_s is not None):
            return None
        return WorkerResults(results, stall_s, loaded)

    def take_ended(self, finished_requests: set[str]) -> set[str]:
        """Requests whose blends ended since the last call, each once.

        Args:
            finished_requests: that want no more of theirs.
        """
        if self._queue is not None:
            self._ended |= self._queue.stop(finished_requests)
        if self._files is not None:
            self._files.forget(finished_requests)
        if self._ahead is not None:
            self._ahead.stop(finished_requests)
        ended, self._ended = self._ended, set()
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Blocks that hold nothing of use, since the last call."""
        failed, self._failed.blocks = self._failed.blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose blocks do, where they are in several groups, since the last call."""
        failed, self._failed.requests = self._failed.requests, set()
        return failed

    def probe(self, name: str, size: int, runner: Any) -> Found:
        """What one of `PROBES` finds. Called while no request runs."""
        assert self._blend_pass is not None
        bench = Bench(self._blend_pass.setting, runner, self._config.model_config.max_model_len)
        return PROBES[name](bench, size)

    def take_captures(self) -> Sequence[Captured]:
        """The chunks whose capture ended since the last call, and could not be told of."""
        return self._capture.take() if self._capture is not None else ()

    def close(self) -> None:
        """Finish what is being written and end the threads."""
        if self._ahead is not None:
            self._ahead.close()
        if self._capture is not None:
            self._capture.close()
        if self._blend_pass is not None:
            self._blend_pass.close()
        if self._files is not None:
            self._files.files.close()
