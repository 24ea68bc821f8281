"""The engine facade: vLLM's `AsyncLLM` in a background thread, for scripts, notebooks and servers.

All methods may be called from any thread and any event loop; requests run side by side in vLLM's
batches. The engine's own loop runs in one daemon thread, the model in vLLM's engine process.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys
import threading
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from semkv_rag.closing import Closing
from semkv_rag.config import ReuseOptions
from semkv_rag.connector.cores import cores_of_its_own
from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.connector.messages import GateReport
from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.engine.bridge import Stream, stream_async
from semkv_rag.engine.chat import ChatService, ChatSettings
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.completion import Completion, join
from semkv_rag.engine.launch import ask_gate, kv_bytes_per_token, resolve, transfer_config
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.prompt_lookup import Tiering
from semkv_rag.engine.scoring import Scored, rendered, score
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.model_name import check_model
from semkv_rag.prompt_cache import Cascade, Encoder, TierOptions
from semkv_rag.report import ReuseReport
from semkv_rag.store import KVStore
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD

T = TypeVar("T")

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, tokens, or vLLM's dictionary of a prompt, such as `{"prompt": …, "multi_modal_data": …}`."""


class Engine(Closing):
    """A model in vLLM, with a store of precomputed KV.

    Args:
        model: a folder or a hub name, as for vLLM.
        store: the store's folder, made when missing; None for plain vLLM.
        index_url: the SQL index, when it is not SQLite in the store's folder.
        reuse: the options of requests that bring none.
        chat_args: options of vLLM's chat, named as on its command line with `_` for `-`, such as
            `{"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}`.
        tiers: how whole prompts that resemble an earlier one are found and stored; None for not at
            all. Needs a store and the extra `tiers`.
        encoders: of the tiers, by layer; see `semkv_rag.prompt_cache.Cascade`.
        engine_args: fields of vLLM's `AsyncEngineArgs`, such as `dtype` or `max_model_len`.

    Attributes:
        model: as given.
        tokenizer: the model's Hugging Face tokenizer.
        max_model_len: the context window, in tokens.
        kv_bytes_per_token: what a token's KV takes in the store.
        fingerprint: of everything that changes KV.
        gate: whether this model is served with reuse, and if not, why.
        store: the store, or None.
        reuse: as given.
        supports_tools: whether the model's own tool calls are understood, by `chat_args`.
        supports_images: whether messages may hold images.

    Raises:
        OptionError: an option cannot be used.
        StoreError: the store cannot be opened.
        EngineError: vLLM cannot be started.
        MissingExtraError: what the tiers need is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        store: str | Path | None = None,
        index_url: str | None = None,
        reuse: ReuseOptions | None = None,
        chat_args: Mapping[str, Any] | None = None,
        tiers: TierOptions | None = None,
        encoders: Mapping[str, Encoder] | None = None,
        **engine_args: Any,
    ) -> None:
        if tiers is not None and store is None:
            raise OptionError("tiers need a store: pass store=…")
        check_model(model, engine_args.get("download_dir"))
        self.model = model
        self.reuse = reuse or ReuseOptions()
        # What the fingerprint stands for, for people who look into the store.
        settings = {name: str(value) for name, value in engine_args.items()}
        self._description = {"model": model, **settings}
        self.store = None if store is None else KVStore(Path(store), index_url=index_url)
        transfer = None
        if self.store is not None:
            transfer = transfer_config(
                self.store.root, index_url=index_url, reuse=self.reuse, request_namespace=True
            )
        try:
            config, obstacle = resolve(model, engine_args, transfer)
            self.fingerprint = config_fingerprint(config)
            self._connected = obstacle is None
            self._chat_settings = ChatSettings(config, model, chat_args or {})
            self._ids = itertools.count()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="semkv-engine", daemon=True
            )
            self._thread.start()
        except BaseException:
            if self.store is not None:
                self.store.close()
            raise
        self._llm: ReportingLLM | None = None
        self._capturer: LLMCapturer | None = None
        self._service: ChatService | None = None
        self._service_lock = asyncio.Lock()
        try:
            self._llm = self._call(self._start(config))
            self.gate = (
                self._call(ask_gate(self._llm)) if obstacle is None else GateReport(False, obstacle)
            )
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise EngineError(f"vLLM did not start: {error}") from error
            raise
        self.tokenizer = self._llm.get_tokenizer()
        self.max_model_len: int = config.model_config.max_model_len
        self.kv_bytes_per_token = kv_bytes_per_token(config)
        self.supports_tools = self._chat_settings.supports_tools
        self.supports_images = self._chat_settings.supports_images
        if self.store is not None:
            self._capturer = LLMCapturer(
                self._llm,
                self._loop,
                store=self.store,
                fingerprint=self.fingerprint,
                description=self._description,
                gate=self.gate,
            )
            if self.gate.servable and tiers is not None:
                try:
                    cascade = Cascade(self.store, self.fingerprint, tiers, encoders)
                    cascade.load()
                except BaseException:
                    self.close()
                    raise
                self._llm.tiering = Tiering(cascade, self._capturer, self._llm)
        # At exit the engine process must end before the interpreter takes our thread away.
        reference = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _close(reference)
        atexit.register(self._at_exit)

    # ---- answering -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Completion:
        """Answer a prompt.

        Args:
            prompt: text, tokens, or vLLM's dictionary of a prompt, for one with images.
            sampling: fields of vLLM's `SamplingParams`, such as `temperature` or `max_tokens`.
            reuse: this request's options instead of the engine's.

        Raises:
            OptionError: an option or the prompt's length cannot be used.
            EngineError: the engine stopped.
        """
        return join(list(self.stream(prompt, sampling=sampling, reuse=reuse)))

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> list[Completion]:
        """Answer many prompts side by side; as `generate`, in the prompts' order."""
        params = self._params(sampling, reuse)

        async def all_of_them() -> list[Completion]:
            answers = [self._answer(prompt, params.clone()) for prompt in prompts]
            return list(await asyncio.gather(*answers))

        return self._call(all_of_them())

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Completion:
        """As `generate`, for an event loop; cancelling it aborts the request."""
        params = self._params(sampling, reuse)
        return await asyncio.wrap_future(self._submit(self._answer(prompt, params)))

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, part by part. Closing the iterator aborts the request."""
        return Stream(self._submit, self._parts(prompt, self._params(sampling, reuse)))

    def astream(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> AsyncIterator[Completion]:
        """As `stream`, for an event loop."""
        return stream_async(self._submit, self._parts(prompt, self._params(sampling, reuse)))

    @property
    def has_tiers(self) -> bool:
        """Whether whole prompts are looked up before they are answered."""
        return self._llm is not None and self._llm.tiering is not None

    def score(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        top: int = 20,
        reuse: ReuseOptions | None = None,
    ) -> list[Scored | None]:
        """What the model would have said in the place of each token of a given answer.

        The prompt's KV is that of `generate` with the same options: teacher forcing, for comparing
        ways to get it.

        Args:
            prompt, answer: tokens, at least one each.
            top: of how many of the likeliest tokens.
            reuse: this request's options instead of the engine's.

        Returns:
            For each token of the answer the log-probabilities in its place by token id: of the `top`
            likeliest, and of itself. None where vLLM's prefix cache held what was to be computed.

        Raises:
            OptionError: an option or the length cannot be used.
            EngineError: the engine stopped.
        """
        if self._llm is None:
            raise EngineError("the engine is closed")
        request_id = f"semkv-{next(self._ids)}"
        wishes = self._transfer(reuse)
        return self._call(score(self._llm, request_id, prompt, answer, top, wishes))

    def tokens_of(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that a request with this prompt has.

        Args:
            prompt: text, or messages for the chat template.

        Raises:
            OptionError: it is too long, or the messages cannot be put through the template.
        """
        return list(self._rendered(prompt)["prompt_token_ids"])

    def prompt_text(self, prompt: str | Sequence[Mapping[str, Any]]) -> str:
        """What the model sees of a prompt, as text: messages through the chat template.

        Raises:
            OptionError: it is too long, or the messages cannot be put through the template.
        """
        if isinstance(prompt, str):
            return prompt
        made = self._rendered(prompt)
        return str(made.get("prompt") or self.tokenizer.decode(made["prompt_token_ids"]))

    def _rendered(self, prompt: str | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if self._llm is None:
            raise EngineError("the engine is closed")
        return self._call(rendered(self._llm, prompt, self._chat_settings.args.chat_template))

    # ---- answering as OpenAI's API ---------------------------------------------------------

    def respond(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> dict[str, Any]:
        """Answer text or messages by vLLM's own OpenAI layer, as `semkv serve` does over HTTP.

        Args:
            prompt: text goes to the model as it is, messages through its chat template.
            fields: further fields of OpenAI's request, and vLLM's, such as `max_tokens`, `tools` or
                `response_format`.
            reuse: this request's options instead of the engine's.

        Returns:
            OpenAI's response, with the reuse report under `["kv_transfer_params"]["semkv"]`.

        Raises:
            OptionError: a field or the prompt's length cannot be used.
            EngineError: the engine stopped.
        """
        return self._call(self._respond(prompt, fields, reuse))

    async def arespond(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> dict[str, Any]:
        """As `respond`, for an event loop; cancelling it aborts the request."""
        return await asyncio.wrap_future(self._submit(self._respond(prompt, fields, reuse)))

    def respond_stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Stream[dict[str, Any]]:
        """As `respond`, chunk by chunk; the last one holds the report and no choices.

        The request is checked before this returns. Closing the stream aborts it.
        """
        return Stream(self._submit, self._call(self._open(prompt, fields, reuse)))

    async def arespond_stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """As `respond_stream`, for an event loop."""
        chunks = await asyncio.wrap_future(self._submit(self._open(prompt, fields, reuse)))
        return stream_async(self._submit, chunks)

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether messages can be answered."""
        return self._chat_settings.has_template(self.tokenizer)

    async def _respond(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any] | None,
        reuse: ReuseOptions | None,
    ) -> dict[str, Any]:
        service = await self._chat_service()
        return await service.answer(prompt, fields or {}, reuse or self.reuse)

    async def _open(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any] | None,
        reuse: ReuseOptions | None,
    ) -> AsyncIterator[dict[str, Any]]:
        service = await self._chat_service()
        return await service.open(prompt, fields or {}, reuse or self.reuse)

    async def _chat_service(self) -> ChatService:
        async with self._service_lock:
            if self._service is None:
                if self._llm is None:
                    raise EngineError("the engine is closed")
                self._service = await ChatService.start(self._llm, self._chat_settings)
            return self._service

    def _transfer(self, reuse: ReuseOptions | None) -> dict[str, Any]:
        return {PARAMS_KEY: (reuse or self.reuse).to_mapping()}

    # ---- what is done ahead ----------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's prefix cache (L0); False when a request under way holds part of it."""

        async def reset() -> bool:
            assert self._llm is not None
            return bool(await self._llm.reset_prefix_cache())

        return self._call(reset())

    # ---- capturing -------------------------------------------------------------------------

    def capture(
        self, items: Iterable[CaptureItem], *, in_flight: int = 32
    ) -> Iterator[CaptureResult]:
        """Prefill chunks and write their files into the store; results come as they are ready.

        The index is left to the caller: see `semkv_rag.corpus`.

        Args:
            items: the chunks, of any number; taken as they are needed.
            in_flight: chunks that are computed or being written at a time.

        Raises:
            EngineError: the engine has no store, its model cannot be served with reuse, or it
                stopped.
        """
        if self._capturer is None:
            raise EngineError("the engine was started without a store: pass store=…")
        return self._capturer.capture(items, in_flight=in_flight)

    def observe(
        self,
        prompt: str | Sequence[int],
        *,
        namespace: str | None = None,
        source_version: str = "",
    ) -> None:
        """Prefill a prompt, store its KV and make it a donor of the tiers, ahead of any request.

        Args:
            prompt: text or tokens; a prompt with images is stored when it is answered.
            source_version: see `ReuseOptions`.

        Raises:
            EngineError: the engine was started without tiers, its model cannot be served with reuse,
                or the prompt could not be computed or written.
            StoreError: the store cannot be written.
        """
        where = self.reuse.namespace if namespace is None else namespace
        self._tiers().observe(prompt, where, source_version)

    def record(self, report: ReuseReport, *, correct: bool) -> bool:
        """Tell the guard whether the answer of the donor that a request explored would have done.

        That is how `reuse="substitute"` learns from which similarity on a stored prompt may be
        answered in a new one's place.

        Args:
            report: of the request's answer.

        Returns:
            False when the request explored nothing, or the donor is gone.

        Raises:
            EngineError: the engine was started without tiers, or its model cannot be served.
            StoreError: the store cannot be written.
        """
        explored = report.explored
        return explored is not None and self._tiers().cascade.record(explored, correct=correct)

    def _tiers(self) -> Tiering:
        tiering = None if self._llm is None else self._llm.tiering
        if tiering is None:
            raise EngineError(
                "no tiers: pass store=… and tiers=TierOptions()"
                if self.gate.servable
                else f"this model cannot be served with reuse: {self.gate.reason}"
            )
        return tiering

    # ---- the loop --------------------------------------------------------------------------

    async def _start(self, config: Any) -> ReportingLLM:
        ranks = config.parallel_config.world_size
        with _script_left_alone(), cores_of_its_own(ranks):
            llm: ReportingLLM = ReportingLLM.from_vllm_config(config, disable_log_stats=True)
            return llm

    def _params(
        self, sampling: Mapping[str, Any] | None, reuse: ReuseOptions | None
    ) -> SamplingParams:
        """vLLM's sampling parameters with our wishes in them; everything is checked here."""
        fields = dict(sampling or {})
        extra = dict(fields.pop("extra_args", None) or {})
        extra[TRANSFER_FIELD] = {**extra.get(TRANSFER_FIELD, {}), **self._transfer(reuse)}
        try:
            if isinstance(fields.get("structured_outputs"), Mapping):
                fields["structured_outputs"] = StructuredOutputsParams(
                    **fields["structured_outputs"]
                )
            return SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)
        except (TypeError, ValueError, VLLMClientError) as error:
            raise OptionError(f"vLLM does not take these sampling parameters: {error}") from error

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> Completion:
        return join([part async for part in self._parts(prompt, params)])

    async def _parts(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Completion]:
        if self._llm is None:
            raise EngineError("the engine is closed")
        request_id = f"semkv-{next(self._ids)}"
        began = time.perf_counter()
        ttft_ms = 0.0
        given: Any = prompt
        if not isinstance(prompt, str | Mapping):
            given = {"prompt_token_ids": list(prompt)}
        try:
            rendered = await self._llm.render(given)
            async for output in self._llm.generate(rendered, params, request_id):
                latency_ms = (time.perf_counter() - began) * 1000
                ttft_ms = ttft_ms or latency_ms
                yield self._part(output, ttft_ms, latency_ms)
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine stopped: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise OptionError(f"vLLM does not take this request: {error}") from error

    def _part(self, output: Any, ttft_ms: float, latency_ms: float) -> Completion:
        answer = output.outputs[0]
        prompt_tokens = len(output.prompt_token_ids or ())
        logprobs = None
        if answer.logprobs is not None:
            logprobs = tuple(
                {token: entry.logprob for token, entry in position.items()}
                for position in answer.logprobs
            )
        report = (output.kv_transfer_params or {}).get(PARAMS_KEY)
        if report is not None:
            reported = ReuseReport.from_mapping(report)
        else:
            reported = self.plain_report(prompt_tokens)
        return Completion(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            prompt_tokens=prompt_tokens,
            report=reported,
            ttft_ms=ttft_ms,
            latency_ms=latency_ms,
        )

    def plain_report(self, prompt_tokens: int) -> ReuseReport:
        """The report of an answer that came without one, because no connector runs."""
        reason = None if self._connected else f"no reuse: {self.gate.reason}"
        return ReuseReport(kv_cache="skip", prompt_tokens=prompt_tokens, reason=reason)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._loop.is_running():
            work.close()
            raise EngineError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the engine's loop and wait for it; Ctrl-C cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine process and close the store. Requests under way are aborted."""
        if (handler := getattr(self, "_at_exit", None)) is not None:
            atexit.unregister(handler)
        if self._llm is not None and self._llm.tiering is not None:
            self._llm.tiering.close()
        if self._loop.is_running():
            if self._llm is not None:
                self._call(self._shutdown())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._llm = None
        if self.store is not None:
            self.store.close()

    async def _shutdown(self) -> None:
        assert self._llm is not None
        self._llm.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def _script_left_alone() -> Iterator[None]:
    """Start processes that do not run the user's script again.

    A spawned process imports the main module first; a script without an `if __name__ == "__main__"`
    around it would start another engine there, and fail. vLLM's processes need nothing of it.
    """
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file


def _close(reference: weakref.ref[Engine]) -> None:
    if (engine := reference()) is not None:
        engine.close()
