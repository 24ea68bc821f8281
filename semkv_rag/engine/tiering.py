"""The tiers around a request: the look-up before it, the capture of its own prefill behind it.

Lives in the client's process. A request that the tiers miss carries the wish that its prompt's KV be
kept while vLLM computes it anyway; a thread waits for the file, promises it to the store, and makes the
prompt a donor. Where part of the prompt came out of vLLM's prefix cache, that KV was not seen: such a
prompt is prefilled once more, when no request is under way.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.corpus.split import tokenize
from semkv_rag.engine.transfer import CAPTURE_KEY, PARAMS_KEY, TRANSFER_FIELD
from semkv_rag.errors import EngineError, SemKVError
from semkv_rag.report import ReuseReport
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkKey
from semkv_rag.tiers import Cascade, Lookup, log_line

if TYPE_CHECKING:
    from vllm import SamplingParams

    from semkv_rag.engine.llm_capturer import LLMCapturer
    from semkv_rag.engine.reporting import ReportingLLM

logger = logging.getLogger(__name__)

PROMPTS_WAITING = 256
"""Prompts to be prefilled once more beyond it push out the oldest."""

QUIET_SECONDS = 1.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TieredRequest:
    """A request that was looked up.

    Attributes:
        tokens: what is sent to the model.
        params: with the wish to be captured, where there is one.
        lookup: what the tiers say.
        ticket: of its capture, or None.
    """

    tokens: list[int]
    params: SamplingParams
    lookup: Lookup
    ticket: int | None

    def told(self, report: ReuseReport) -> ReuseReport:
        """A report with what the tiers say."""
        served = self.lookup.served
        return replace(
            report,
            tiers=dict(self.lookup.statuses),
            served_by=None if served is None else served.tier,
            donor=None if served is None else served.donor.id,
            similarity=None if served is None else round(served.similarity, 4),
        )


class Tiering:
    """One per engine.

    Args:
        cascade: closed with this.
        capturer: of the same engine.
        llm: asked whether requests are under way.
    """

    def __init__(self, cascade: Cascade, capturer: LLMCapturer, llm: ReportingLLM) -> None:
        self.cascade = cascade
        self._capturer = capturer
        self._llm = llm
        self._written: queue.Queue[tuple[Lookup, int]] = queue.Queue()
        self._again: deque[Lookup] = deque(maxlen=PROMPTS_WAITING)
        self._closed = threading.Event()
        capturer.store.add_model(capturer.fingerprint, capturer.description)
        self._thread = threading.Thread(target=self._run, name="semkv-tiers", daemon=True)
        self._thread.start()

    # ---- in the engine's loop ----------------------------------------------------------------

    async def begin(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> TieredRequest | None:
        """Look a request up; None for one that wants no reuse."""
        extra = dict(params.extra_args or {})
        transfer = dict(extra.get(TRANSFER_FIELD) or {})
        wishes = dict(transfer.get(PARAMS_KEY) or {})
        if not wishes.get("enabled", True):
            return None
        text, tokens = self._both(prompt)
        lookup = await asyncio.to_thread(self.cascade.lookup, text, tokens, wishes["namespace"])
        ticket = None
        if await asyncio.to_thread(self.cascade.wants, lookup):
            ticket, wishes[CAPTURE_KEY] = self._capturer.in_passing(self._item(lookup))
        params = params.clone()
        params.extra_args = {**extra, TRANSFER_FIELD: {**transfer, PARAMS_KEY: wishes}}
        return TieredRequest(lookup.tokens.tolist(), params, lookup, ticket)

    def end(
        self, request: TieredRequest, request_id: str, report: ReuseReport | None, latency_s: float
    ) -> None:
        """Take what became of a request.

        Args:
            report: None when it ended before its answer did.
        """
        if report is not None and logger.isEnabledFor(logging.INFO):
            reused = report.exact_tokens + report.reused_tokens
            told = log_line(
                request_id,
                request.lookup,
                report.kv_cache,
                latency_s=latency_s,
                tokens_reused=reused,
            )
            logger.info("%s", told)
        if request.ticket is None:
            return
        if report is None or report.kv_cache == "hit":
            # Where stored KV was used, the request's own KV is not all its own.
            self._capturer.forget(request.ticket)
        else:
            self._written.put((request.lookup, request.ticket))

    # ---- for callers ---------------------------------------------------------------------------

    def observe(self, prompt: str | Sequence[int], namespace: str) -> None:
        """Prefill a prompt, store its KV, and make it a donor.

        Raises:
            EngineError: it could not be computed or written.
            StoreError: the store cannot be written.
        """
        text, tokens = self._both(prompt)
        self._compute(self.cascade.lookup(text, tokens, namespace))

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until the captures of requests that have ended are stored."""
        end = time.monotonic() + timeout_s
        while self._written.unfinished_tasks and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 10)

    def close(self) -> None:
        """Store what is being written; what would have to be computed again is dropped."""
        self._closed.set()
        self._thread.join()
        self.cascade.close()

    # ---- in its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                lookup, ticket = self._written.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._closed.is_set():
                    return
                if self._again and self._is_quiet():
                    self._guarded(self._compute_when_quiet, self._again.popleft())
                continue
            self._guarded(self._store, lookup, ticket)
            self._written.task_done()

    def _guarded(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            work(*arguments)
        except SemKVError as error:
            logger.info("semkv: a prompt was not stored: %s", error)
        except Exception:
            logger.exception("A prompt was not stored")

    def _is_quiet(self) -> bool:
        return self._llm.active == 0 and time.monotonic() - self._llm.quiet_since > QUIET_SECONDS

    def _store(self, lookup: Lookup, ticket: int) -> None:
        result = self._capturer.wait_for(ticket)
        if result is None or result.incomplete:
            self._again.append(lookup)
        elif result.error is not None:
            raise EngineError(result.error)
        else:
            self._promise(lookup)

    def _compute_when_quiet(self, lookup: Lookup) -> None:
        def abandon() -> bool:
            return self._closed.is_set() or self._llm.active > 0

        if not self._compute(lookup, abandon):
            self._again.append(lookup)

    def _compute(self, lookup: Lookup, abandon: Callable[[], bool] = lambda: False) -> bool:
        """Prefill a prompt and make it a donor; False when it was abandoned."""
        item = self._item(lookup)
        store, model = self._capturer.store, self._capturer.fingerprint
        if not store.get(model, item.namespace, [item.id]):
            result = next(self._capturer.capture([item], abandon=abandon), None)
            if result is None:
                return False
            if result.error is not None:
                raise EngineError(result.error)
        self._promise(lookup)
        return True

    def _promise(self, lookup: Lookup) -> None:
        asked = lookup.asked
        key = ChunkKey(asked.id, self._capturer.fingerprint, asked.namespace)
        self._capturer.store.add([key])
        self.cascade.observe(asked.text, asked.tokens, asked.namespace, vectors=lookup.vectors)

    # --------------------------------------------------------------------------------------------

    def _both(self, prompt: str | Sequence[int]) -> tuple[str, Any]:
        """A prompt's text and its tokens, [tokens]."""
        tokenizer = self._capturer.tokenizer
        if isinstance(prompt, str):
            return prompt, tokenize(tokenizer, prompt, special=True)
        tokens = token_array(prompt)
        return tokenizer.decode(tokens.tolist()), tokens

    def _item(self, lookup: Lookup) -> CaptureItem:
        asked = lookup.asked
        return CaptureItem(asked.id, asked.namespace, "prompt", asked.tokens, token_array([]))
