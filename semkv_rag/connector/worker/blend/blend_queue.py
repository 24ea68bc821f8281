"""The blends under way on one worker, and whose turn it is.

To vLLM a blend is an asynchronous load: the request has its blocks and no place in a step until the blend
is done. In every step meanwhile, behind the step's forward, the blends compute as many tokens as the step
has left, in the order in which they began, as vLLM's own chunked prefill does; those of several go in one
forward. Stored KV loads beside that. Where no step under way has a forward nobody waits, so there a blend
waits for its KV, layer by layer.

A fault never fails a request: its blocks are named to vLLM, which computes its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

import torch

from semkv_rag.connector.messages import ON_ANOTHER_RANK, BlendResult, BlendTask
from semkv_rag.connector.worker.blend.blend_pass import Blend, BlendPass
from semkv_rag.connector.worker.blend.launch import Launch
from semkv_rag.connector.worker.blend.stored_kv import LostKV, Sources
from semkv_rag.connector.worker.model.draft_kv import DraftKV
from semkv_rag.connector.worker.model.scattered import MOST_RUNS
from semkv_rag.connector.worker.ranks import total

logger = logging.getLogger(__name__)

ENOUGH_ON_CPU = 256
"""Tokens of a forward beyond which others in it save nothing: its cost grows with their number."""
SCRAP = 32
"""Tokens of a step that are left unused rather than given a forward of their own."""


class BlendQueue:
    """The blends of one worker, in the thread of the model.

    Args:
        open_sources: opens a task's chunks.
        draft_kv: the paged KV of the model that drafts.

    Attributes:
        results: of the blends that ended, by request; whoever takes them empties it.
        failed: the tasks of those whose tokens vLLM must compute.
        computed: whether anything was computed in the last `advance`.
    """

    def __init__(
        self,
        blend_pass: BlendPass,
        open_sources: Callable[[BlendTask], Sources],
        draft_kv: DraftKV,
    ) -> None:
        self._pass, self._open_sources, self._draft_kv = blend_pass, open_sources, draft_kv
        self._ranks = blend_pass.setting.model.ranks.count
        self._device = blend_pass.setting.model.paged.device
        on_cpu = self._device.type == "cpu"
        self._enough = ENOUGH_ON_CPU if on_cpu else blend_pass.setting.piece_tokens
        self._active: dict[str, Blend] = {}
        self._sound: set[str] = set()  # all ranks have the KV of these
        self.results: dict[str, BlendResult] = {}
        self.failed: list[BlendTask] = []
        self.computed = False

    @property
    def loading(self) -> list[BlendTask]:
        """The tasks under way whose stored KV is not in the cache yet."""
        return [blend.task for blend in self._active.values() if not blend.stored.settled]

    def begin(self, tasks: Iterable[BlendTask]) -> None:
        """Let blends begin; nothing of them is computed yet."""
        tried = [(task, self._begin(task)) for task in tasks]
        failed = self._on_any_rank([fault for _, fault in tried])
        for (task, fault), lost in zip(tried, failed, strict=True):
            if lost:
                self._fail(task, fault or LostKV(ON_ANOTHER_RANK))

    def advance(self, budget: int, *, idle: bool) -> None:
        """Compute about `budget` tokens.

        Args:
            idle: whether blends may wait for what is being loaded.
        """
        self.computed = False
        ready = self._ready(idle=idle) if self._active else ()
        ended = len(self.results)
        least = min(budget, SCRAP)
        # When a blend ends, so does the step: its request waits for the next one.
        while budget >= least > 0 and len(self.results) == ended:
            pieces = self._take(ready, budget)
            if not pieces:
                return
            self._compute(pieces)
            self.computed = True
            budget -= sum(len(piece) for piece in pieces.values())

    def stop(self, request_ids: Collection[str]) -> set[str]:
        """Stop the blends of requests that ended; those of them that had one."""
        stopped = self._active.keys() & set(request_ids)
        for request_id in stopped:
            self._drop(self._active[request_id])
        return stopped

    def give_up(self, reason: str) -> None:
        """End all blends; vLLM computes their tokens."""
        for blend in list(self._active.values()):
            self._fail(blend.task, LostKV(reason))

    def _begin(self, task: BlendTask) -> Exception | None:
        """Let a blend begin; why it cannot, or None."""
        try:
            self._draft_kv.clear(task)
            self._active[task.request_id] = self._pass.begin(task, self._open_sources(task))
        except Exception as fault:
            return fault
        return None

    def _on_any_rank(self, faults: Collection[Exception | None]) -> list[bool]:
        """Which blends could not begin on some rank; all ranks find the same."""
        failed = [fault is not None for fault in faults]
        if self._ranks == 1 or not failed:
            return failed
        flags = torch.tensor(failed, dtype=torch.float32, device=self._device)
        return [round(flag) > 0 for flag in total(flags).tolist()]

    def _take(self, ready: Collection[str], budget: int) -> dict[str, Launch]:
        """What goes into the next forward, by request."""
        pieces: dict[str, Launch] = {}
        tokens, runs, until = min(budget, self._enough), MOST_RUNS, None
        for request_id, blend in list(self._active.items()):
            launch = self._next(blend) if request_id in ready else None
            if launch is None:
                continue
            # A forward that waits for KV, and may not get it, is nobody else's.
            alone = not blend.stored.settled
            apart = alone or launch.until != until or (launch.whole and len(launch) > tokens)
            if pieces and (apart or not self._may_join(launch, pieces.values())):
                continue
            piece = blend.take(budget if not pieces else tokens, runs)
            pieces[request_id] = piece
            tokens, runs, until = tokens - len(piece), runs - piece.runs, launch.until
            if alone or tokens <= 0 or runs <= 0:
                break
        return pieces

    def _may_join(self, launch: Launch, others: Iterable[Launch]) -> bool:
        """Whether vLLM computes so many adapters in one forward."""
        adapters = self._pass.setting.model.adapters
        if adapters is None or launch.adapter is None:
            return True
        numbers = {
            one.adapter.request.lora_int_id for one in (launch, *others) if one.adapter is not None
        }
        return len(numbers) <= adapters.most

    def _next(self, blend: Blend) -> Launch | None:
        """What a blend wants computed; None when it is done, or failed."""
        try:
            blend.stored.check()  # a fault in a forward with others would fail them, too
            launch = blend.next()
        except Exception as fault:
            self._fail_all([blend.task.request_id], fault)
            return None
        if blend.stats is not None:
            request_id = blend.task.request_id
            self.results[request_id] = BlendResult(request_id, blend.stats)
            self._drop(blend)
        return launch

    def _compute(self, pieces: dict[str, Launch]) -> None:
        try:
            self._pass.compute(list(pieces.values()))
        except Exception as fault:
            self._fail_all(pieces, fault)

    def _fail_all(self, request_ids: Iterable[str], fault: Exception) -> None:
        """End blends at a fault under way.

        Raises:
            Exception: the fault, where several ranks have not agreed on it: another may be waiting for
                this one, as in a forward of vLLM's own.
        """
        if self._ranks > 1 and not isinstance(fault, LostKV):
            raise fault
        for request_id in request_ids:
            self._fail(self._active[request_id].task, fault)

    def _ready(self, *, idle: bool) -> Collection[str]:
        """Whose turn it may be; all ranks find the same."""
        if self._ranks > 1:
            return self._agreed(wait=idle)
        if idle:
            return list(self._active)
        return [name for name, blend in self._active.items() if blend.stored.settled]

    def _agreed(self, *, wait: bool) -> Collection[str]:
        """Those of which all ranks have the whole KV: a rank that went on alone would wait for the others
        forever, and so would a rank that found a fault halfway."""
        asked = [blend for name, blend in self._active.items() if name not in self._sound]
        if not asked:
            return self._sound
        if wait:
            for blend in asked:
                blend.stored.settle()
        flags = torch.tensor(
            [[float(one.stored.settled), float(one.stored.fault is not None)] for one in asked],
            device=self._device,
        )
        for blend, (settled, faults) in zip(asked, total(flags).tolist(), strict=True):
            if round(settled) < self._ranks:
                continue
            if round(faults):
                elsewhere = LostKV(ON_ANOTHER_RANK)
                self._fail(blend.task, blend.stored.fault or elsewhere)
            else:
                self._sound.add(blend.task.request_id)
        return self._sound

    def _fail(self, task: BlendTask, fault: Exception) -> None:
        if isinstance(fault, LostKV):
            result = BlendResult(task.request_id, None, str(fault), fault.bad_chunks, fault.fault)
        else:
            logger.error("A blend failed; its tokens are computed", exc_info=fault)
            error = f"the blend failed: {fault!r}"
            result = BlendResult(task.request_id, None, error, fault="internal")
        self.results[task.request_id] = result
        self.failed.append(task)
        if task.request_id in self._active:
            self._drop(self._active[task.request_id])

    def _drop(self, blend: Blend) -> None:
        blend.end()
        del self._active[blend.task.request_id]
        self._sound.discard(blend.task.request_id)
