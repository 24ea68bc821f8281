"""The worker's half of the connector: blends before a step's forward, captures behind it.

`bind` is called once, when the model and its paged cache are there; it runs the gate. Then, once for
every step: `begin_step` before anything else, `blend` before the forward (only in steps that have
blends), `end_step` behind it.

A fault of the store, or of ours, never fails a request: its tokens are prefilled in place and the
reason goes to its report. If even that fails, the blocks are named to vLLM, which computes them again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from semkv_rag.connector.messages import BlendResult, BlendTask, Captured, GateReport, StepMetadata
from semkv_rag.connector.threads import pool_beside_model
from semkv_rag.connector.worker.blend.blend_pass import BlendPass
from semkv_rag.connector.worker.blend.setting import BlendSetting
from semkv_rag.connector.worker.capture.capture import ChunkCapture
from semkv_rag.connector.worker.capture.lull import Lull
from semkv_rag.connector.worker.gate import run_gate
from semkv_rag.connector.worker.model.block_layout import find_layouts
from semkv_rag.connector.worker.model.eager import EagerModel
from semkv_rag.connector.worker.model.kv_tap import KVTap
from semkv_rag.connector.worker.model.model_view import Unservable, model_layers
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.spoiling import Spoiling
from semkv_rag.errors import ChunkFileError
from semkv_rag.store import ChunkFile
from semkv_rag.store.files.paths import chunk_path

logger = logging.getLogger(__name__)


class BlendExecutor:
    """One per worker.

    Args:
        root: the store's folder.
    """

    def __init__(self, config: VllmConfig, root: Path) -> None:
        self.gate = GateReport(
            False, "the model was not handed over: set worker_cls to SemKVWorker"
        )
        self._config = config
        self._root = root
        self._rank = 0
        self._ranks = 1
        self._shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]] = ()
        self._blend_pass: BlendPass | None = None
        self._capture: ChunkCapture | None = None
        self._spoiling: Spoiling | None = None
        self._lull = Lull()
        self._step: StepMetadata | None = None
        self._results: dict[str, BlendResult] = {}
        self._failed_blocks: set[int] = set()

    def bind(self, runner: Any) -> None:
        """Take the model runner, whose paged cache is allocated, and pass the gate."""
        try:
            groups = runner.kv_cache_config.kv_cache_groups
            if len(groups) != 1:
                raise Unservable(f"its cache has {len(groups)} groups (hybrid cache)")
            layers = model_layers(runner.get_model(), self._config)
            self._shapes = [layer.kv_shapes for layer in layers]
            self._rank = get_tensor_model_parallel_rank()
            self._ranks = get_tensor_model_parallel_world_size()
            block_size = self._config.cache_config.block_size
            tap, paged = KVTap(layers), PagedKV(runner, block_size)
            layouts = find_layouts(layers, tap, paged, runner.dtype)
            self._blend_pass = BlendPass(
                BlendSetting(
                    model=EagerModel(runner.get_model(), layers, tap, paged, self._config),
                    piece_tokens=self._config.scheduler_config.max_num_batched_tokens,
                    layouts=layouts,
                    total=tensor_model_parallel_all_reduce,
                    loading=pool_beside_model(1, "semkv-load"),
                )
            )
            self._spoiling = Spoiling(paged, layouts)
            self._capture = ChunkCapture(
                self._root,
                paged,
                layouts,
                self._rank,
                self._ranks,
                self._lull,
            )
            self.gate = run_gate(
                self._blend_pass,
                vocabulary=self._config.model_config.get_vocab_size(),
                block_size=block_size,
                blocks=runner.kv_cache_config.num_blocks,
                dtype=runner.dtype,
            )
        except Unservable as reason:
            self.gate = GateReport(False, str(reason))
        except Exception as error:
            logger.exception("The gate failed; the engine runs without reuse")
            self.gate = GateReport(False, f"the gate failed: {error!r}")
        if not self.gate.servable:
            logger.warning("semkv: this model is answered without reuse: %s", self.gate.reason)

    # ---- a step ----------------------------------------------------------------------------

    def begin_step(self, metadata: StepMetadata) -> None:
        self._step = metadata
        self._lull.step()

    def blend(self) -> None:
        """Run the step's blends in order: a later one may build on an earlier one's blocks."""
        assert self._step is not None
        for task in self._step.blends:
            self._results[task.request_id] = self._blend(task, self._step.model)

    def end_step(self) -> None:
        if self._step is not None and self._step.blends:
            self._refuse_what_is_no_number(self._step.blends)
        if self._step is not None and self._step.captures and self._capture is not None:
            self._capture.keep(self._step.captures, self._step.model, self._failed_blocks)
        self._lull.step()
        self._step = None

    def _blend(self, task: BlendTask, model: str) -> BlendResult:
        assert self._blend_pass is not None
        bad: tuple[str, ...] = ()
        try:
            with contextlib.ExitStack() as files:
                sources, bad, error = self._open(task, model, files)
                if error is None:
                    try:
                        stats = self._blend_pass.run(task, sources)
                        return BlendResult(task.request_id, stats)
                    except ChunkFileError as fault:
                        error, bad = str(fault), _damaged(sources)
        except Exception as fault:
            logger.exception("A blend failed; its tokens are computed")
            error = f"the blend failed: {fault!r}"
        if task.images:
            self._leave_to_vllm(task)
        else:
            try:
                self._blend_pass.prefill(task)
            except Exception:
                logger.exception("The prefill of a failed blend failed; vLLM computes the tokens")
                self._leave_to_vllm(task)
        return BlendResult(task.request_id, None, error, bad)

    def _refuse_what_is_no_number(self, blends: Sequence[BlendTask]) -> None:
        """Have vLLM compute the requests whose KV has become NaN or infinite, and leave none of it."""
        asked = [
            task
            for task in blends
            if task.end > task.plan.covered and self._results[task.request_id].stats is not None
        ]
        if not asked or self._spoiling is None:
            return
        for task in self._spoiling.find(asked):
            logger.warning("Stored KV gives no numbers; the request is computed")
            self._failed_blocks.update(self._spoiling.clear(task))
            chunks = tuple(dict.fromkeys(span.chunk_id for span in task.plan.spans))
            self._results[task.request_id] = BlendResult(
                task.request_id, None, "with the stored KV the model gives no numbers", chunks
            )

    def _leave_to_vllm(self, task: BlendTask) -> None:
        """Have vLLM start the request again from the first token that was to be filled in."""
        block_size = self._config.cache_config.block_size
        last = -(-task.plan.covered // block_size)
        self._failed_blocks.update(task.block_ids[task.start // block_size : last])

    def _open(
        self, task: BlendTask, model: str, files: contextlib.ExitStack
    ) -> tuple[Mapping[str, ChunkFile], tuple[str, ...], str | None]:
        """Open the task's chunk files on this rank.

        Returns:
            The files by chunk id, the chunks whose files are bad, and what is wrong with them (on
            any rank: a rank that went on alone would wait for the others forever).
        """
        sources: dict[str, ChunkFile] = {}
        bad: list[str] = []
        error: str | None = None
        namespace = task.plan.options.namespace
        for chunk_id in dict.fromkeys(span.chunk_id for span in task.plan.spans):
            path = chunk_path(self._root, model, namespace, chunk_id, self._rank)
            try:
                file = files.enter_context(ChunkFile(path, model=model, chunk_id=chunk_id))
                file.require(self._shapes)
                if self._ranks > 1:
                    file.verify()  # a fault found halfway could not be agreed on any more
                sources[chunk_id] = file
            except ChunkFileError as fault:
                bad.append(chunk_id)
                error = str(fault)
        if self._ranks > 1:
            # A float: vLLM's all-reduce over shared memory takes no integers.
            faults = torch.tensor([float(len(bad))], device=self._config.device_config.device)
            if int(tensor_model_parallel_all_reduce(faults)) and error is None:
                error = "a chunk file could not be read on another rank"
        return sources, tuple(bad), error

    # ---- what others ask for ---------------------------------------------------------------

    def take_results(self) -> dict[str, BlendResult]:
        """The blends that ended since the last call."""
        results, self._results = self._results, {}
        return results

    def take_failed_blocks(self) -> set[int]:
        """Blocks that hold nothing of use, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_captures(self) -> Sequence[Captured]:
        """The chunks whose capture ended since the last call."""
        return self._capture.take() if self._capture is not None else ()

    def close(self) -> None:
        """Finish what is being written and end the threads."""
        if self._capture is not None:
            self._capture.close()
        if self._blend_pass is not None:
            self._blend_pass.close()


def _damaged(sources: Mapping[str, ChunkFile]) -> tuple[str, ...]:
    """The chunks whose files do not check out."""
    damaged = []
    for chunk_id, file in sources.items():
        try:
            file.verify()
        except ChunkFileError:
            damaged.append(chunk_id)
    return tuple(damaged)
