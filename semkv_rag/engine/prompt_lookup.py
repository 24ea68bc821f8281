"""The tiers around a request: the look-up before it, the capture of its own prefill behind it.

This runs in the client's process, around `ReportingLLM.generate`, so every request to the engine is
looked up. A request that the tiers miss asks for its prompt's KV, which vLLM computes anyway, to be
captured. A thread waits for the file, promises it to the store, and makes the prompt a donor.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest

from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.corpus.split import tokenize
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.feature_encoder import ImageFeatureEncoder
from semkv_rag.engine.image_inputs import IMAGES_FIELD, images_of
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.looked_up import LookedUp
from semkv_rag.errors import EngineError, OptionError, SemKVError
from semkv_rag.prompt_cache import Cascade, Lookup
from semkv_rag.report import ReuseReport, log_line
from semkv_rag.reuse import tell_images_apart, token_array
from semkv_rag.store import ChunkKey
from semkv_rag.unicode_text import is_unicode, not_unicode
from semkv_rag.wire import (
    CAPTURE_KEY,
    NEAR_IMAGES_KEY,
    PARAMS_KEY,
    STORE_IMAGES_KEY,
    TRANSFER_FIELD,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
FLUSH_SECONDS = 30.0
CLOSE_SECONDS = 60.0
"""Prompts that are not written by then, when the engine is closed, are lost."""


class PromptLookup:
    """Finds stored prompts and stores new ones; one per engine.

    The model with a LoRA adapter has stored prompts of its own.

    Args:
        cascade: of the model alone; closed with this.
        capturer: of the same engine.
        llm: of the same engine.
    """

    def __init__(self, cascade: Cascade, capturer: LLMCapturer, llm: ReportingLLM) -> None:
        self._cascades = {capturer.fingerprint: cascade}
        self._adding = threading.Lock()
        self._capturer = capturer
        self._llm = llm
        self._written: queue.Queue[tuple[Lookup, int]] = queue.Queue()
        self._closed = threading.Event()
        self._closing = threading.Lock()
        capturer.store.add_model(capturer.fingerprint, capturer.description)
        for encoder in cascade.encoders:
            if isinstance(encoder, ImageFeatureEncoder):
                encoder.bind(llm, capturer)
        self._thread = threading.Thread(target=self._run, name="semkv-tiers", daemon=True)
        self._thread.start()

    # ---- in the engine's loop ----------------------------------------------------------------

    async def begin(
        self, prompt: Any, params: SamplingParams, lora: LoRARequest | None
    ) -> LookedUp | None:
        """Look a request up; None for one that wants no reuse, or cannot be looked up.

        Args:
            prompt: as vLLM's renderer gives it.
            lora: the adapter that answers; None for the model alone.
        """
        try:
            return await self._begin(prompt, params, lora)
        except Exception:
            logger.exception("The tiers failed; the request is answered without them")
            return None

    async def _begin(
        self, prompt: Any, params: SamplingParams, lora: LoRARequest | None
    ) -> LookedUp | None:
        if not isinstance(prompt, dict) or prompt.get("type") not in ("token", "multimodal"):
            return None
        extra = dict(params.extra_args or {})
        transfer = dict(extra.get(TRANSFER_FIELD) or {})
        wishes = dict(transfer.get(PARAMS_KEY) or {})
        if not wishes.get("enabled", True):
            return None
        try:
            lookup, cascade, capturer = await asyncio.to_thread(self._look_up, prompt, wishes, lora)
        except OptionError:  # the adapter is in no folder of this machine
            return None
        if lookup.tokens is not lookup.asked.tokens:
            prompt = tokens_input(lookup.tokens.tolist(), cache_salt=prompt.get("cache_salt"))
        ticket = None
        wanted = params.n == 1 and await asyncio.to_thread(cascade.wants, lookup)
        if wanted:
            ticket, wishes[CAPTURE_KEY] = capturer.in_passing(
                self._item(lookup), behind_exact=lookup.served is None
            )
        if lookup.asked.image_keys and cascade.options.capture:
            wishes[STORE_IMAGES_KEY] = True
        if lookup.near_image is not None:
            wishes[NEAR_IMAGES_KEY] = {lookup.asked.images_digest: lookup.near_image}
        params = params.clone()
        params.extra_args = {**extra, TRANSFER_FIELD: {**transfer, PARAMS_KEY: wishes}}
        return LookedUp(prompt, params, lookup, ticket)

    def _look_up(
        self, prompt: dict[str, Any], wishes: dict[str, Any], lora: LoRARequest | None
    ) -> tuple[Lookup, Cascade, LLMCapturer]:
        cascade, capturer = self.prompts_of(lora)
        images = images_of(prompt)
        tokens = token_array(prompt["prompt_token_ids"])
        text = prompt.get("prompt") or self._capturer.tokenizer.decode(tokens.tolist())
        lookup = cascade.lookup(
            text,
            tell_images_apart(tokens, images),
            wishes.get("namespace", DEFAULT_NAMESPACE),
            prompt.get(IMAGES_FIELD),
            image_keys=[image.key for image in images],
            source_version=wishes.get("source_version", ""),
        )
        return lookup, cascade, capturer

    def end(
        self,
        request: LookedUp,
        request_id: str,
        report: ReuseReport | None,
        *,
        latency_s: float,
        captured: bool,
    ) -> None:
        """Take what became of a request.

        Args:
            report: None when it ended before its answer did.
            captured: whether the engine has captured it.
        """
        if report is not None and logger.isEnabledFor(logging.INFO):
            logger.info("%s", log_line(request_id, report, latency_s=latency_s))
        if request.ticket is None:
            return
        if captured and report is not None and not self._closed.is_set():
            self._written.put((request.lookup, request.ticket))
        else:
            self._capturer.forget(request.ticket)

    # ---- for callers ---------------------------------------------------------------------------

    def prompts_of(self, lora: LoRARequest | None) -> tuple[Cascade, LLMCapturer]:
        """The stored prompts of the model, or of it with an adapter, and what stores them.

        Raises:
            OptionError: the engine serves no adapters, or there is none in the folder.
            StoreError: the store cannot be read or written.
        """
        capturer = self._capturer if lora is None else self._capturer.with_adapter(lora)
        return self.cascade_of(capturer), capturer

    def cascade_of(self, capturer: LLMCapturer) -> Cascade:
        """The stored prompts of what a capturer of this engine stores for.

        Raises:
            StoreError: the store cannot be read or written.
        """
        model = capturer.fingerprint
        if (known := self._cascades.get(model)) is not None:
            return known
        with self._adding:  # while an adapter's vectors are read, only its own requests wait
            if model not in self._cascades:
                capturer.store.add_model(model, capturer.description)
                self._cascades[model] = self._cascades[self._capturer.fingerprint].of_model(model)
            return self._cascades[model]

    def observe(
        self,
        prompt: str | Sequence[int],
        namespace: str,
        source_version: str = "",
        lora: LoRARequest | None = None,
    ) -> None:
        """Prefill a prompt, store its KV, and make it a donor.

        Raises:
            OptionError: the prompt is no text, or as of `prompts_of`.
            EngineError: it could not be computed or written.
            StoreError: the store cannot be written.
        """
        cascade, capturer = self.prompts_of(lora)
        tokenizer = capturer.tokenizer
        if isinstance(prompt, str):
            if not is_unicode(prompt):
                raise OptionError(f"the prompt is no text: {not_unicode(prompt)}")
            text, tokens = prompt, tokenize(tokenizer, prompt, special=True)
        else:
            tokens = token_array(prompt)
            text = tokenizer.decode(tokens.tolist())
        lookup = cascade.lookup(text, tokens, namespace, source_version=source_version)
        item = self._item(lookup)
        if not capturer.store.get(capturer.fingerprint, namespace, [item.id]):
            (result,) = capturer.capture([item])
            if result.error is not None:
                raise EngineError(result.error)
        self._promise(lookup)

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until the captures of requests that have ended are stored."""
        end = time.monotonic() + timeout_s
        while self._written.unfinished_tasks and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 10)
        self._flush_states()

    def close(self) -> None:
        """Store what is being written, while the engine still runs; a second time nothing is done."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            self._thread.join(CLOSE_SECONDS)
            self._flush_states()
            with self._adding:
                for cascade in self._cascades.values():
                    cascade.close()

    def _flush_states(self) -> None:
        """Wait until the features of images that were computed so far are stored."""
        if self._llm.vllm_config.ec_transfer_config is None:
            return
        try:
            flush = self._capturer.submit(self._llm.collective_rpc("semkv_flush_states"))
            flush.result(FLUSH_SECONDS)
        except Exception as error:  # the engine stopped: what waited is lost
            logger.info("semkv: features of images may not have been stored: %r", error)

    # ---- in its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                lookup, ticket = self._written.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._closed.is_set():
                    return
                continue
            try:
                self._store(lookup, ticket)
            except SemKVError as error:
                logger.info("semkv: a prompt was not stored: %s", error)
            except Exception:
                logger.exception("A prompt was not stored")
            self._written.task_done()

    def _store(self, lookup: Lookup, ticket: int) -> None:
        result = self._capturer.wait_for(ticket)
        if result is None:
            raise EngineError("the engine did not say that it was written")
        if result.error is not None:
            raise EngineError(result.error)
        self._promise(lookup)

    def _promise(self, lookup: Lookup) -> None:
        asked = lookup.asked
        self._capturer.store.add([ChunkKey(asked.id, asked.model, asked.namespace)])
        self._cascades[asked.model].observe(
            asked.text,
            asked.tokens,
            asked.namespace,
            asked.images,
            image_keys=asked.image_keys,
            source_version=asked.source_version,
            vectors=lookup.vectors,
        )

    # --------------------------------------------------------------------------------------------

    def _item(self, lookup: Lookup) -> CaptureItem:
        asked = lookup.asked
        return CaptureItem(asked.id, asked.namespace, "prompt", asked.tokens, token_array([]))
