"""The engine facade: vLLM's `AsyncLLM` in a background thread, for scripts, notebooks and servers.

All methods may be called from any thread and any event loop; requests run side by side in vLLM's
batches. The engine's own loop runs in one daemon thread, the model in vLLM's engine process.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
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
from functools import cached_property
from pathlib import Path
from typing import Any

from semkv_rag.closing import Closing
from semkv_rag.config import ReuseOptions
from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.engine.asking import Prompt, parts, sampling_params
from semkv_rag.engine.bridge import Stream, stream_async
from semkv_rag.engine.chat import ChatService, ChatSettings
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.completion import Completion, join
from semkv_rag.engine.launch import (
    engine_arguments,
    kv_bytes_per_token,
    resolve,
    transfer_config,
)
from semkv_rag.engine.loop import EngineLoop
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.engine.scoring import Scored, rendered, score
from semkv_rag.engine.startup import Started, start
from semkv_rag.errors import EngineError, OptionError, SemKVError
from semkv_rag.model_name import check_model
from semkv_rag.prompt_cache import Encoder, TierOptions
from semkv_rag.report import ReuseReport
from semkv_rag.store import KVStore
from semkv_rag.wire import PARAMS_KEY

CAPTURES_IN_FLIGHT = 32


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
        self._llm: ReportingLLM | None = None
        self._ids = itertools.count()
        self.store = None if store is None else KVStore(Path(store), index_url=index_url)
        self._loop = EngineLoop()
        try:
            transfer = None
            if self.store is not None:
                transfer = transfer_config(
                    self.store.root, index_url=index_url, reuse=self.reuse, request_namespace=True
                )
            config, obstacle = resolve(engine_arguments(model, engine_args), transfer)
            self._chat_settings = ChatSettings(config, model, chat_args or {})
            started = self._start(
                start(
                    config,
                    obstacle,
                    store=self.store,
                    description={"model": model, **{k: str(v) for k, v in engine_args.items()}},
                    tiers=tiers,
                    encoders=encoders,
                    in_flight=CAPTURES_IN_FLIGHT,
                    disable_log_stats=True,
                )
            )
        except BaseException:
            self.close()
            raise
        self._llm, self.gate, self._capturer = started.llm, started.gate, started.capturer
        self._connected = obstacle is None
        self._service = ChatService(self._llm, self._chat_settings)
        self.fingerprint = config_fingerprint(config)
        self.tokenizer = self._llm.get_tokenizer()
        self.max_model_len: int = config.model_config.max_model_len
        self.kv_bytes_per_token = kv_bytes_per_token(config)
        # At exit the engine process must end before the interpreter takes our thread away.
        reference = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _close(reference)
        atexit.register(self._at_exit)

    def _start(self, starting: Coroutine[Any, Any, Started]) -> Started:
        try:
            return self._loop.call(starting)
        except SemKVError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not start: {error}") from error

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
        params = sampling_params(sampling, reuse or self.reuse)

        async def all_of_them() -> list[Completion]:
            answers = [self._answer(prompt, params.clone()) for prompt in prompts]
            return list(await asyncio.gather(*answers))

        return self._loop.call(all_of_them())

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Completion:
        """As `generate`, for an event loop; cancelling it aborts the request."""
        params = sampling_params(sampling, reuse or self.reuse)
        return await asyncio.wrap_future(self._loop.submit(self._answer(prompt, params)))

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, part by part. Closing the iterator aborts the request."""
        params = sampling_params(sampling, reuse or self.reuse)
        return Stream(self._loop.submit, self._parts(prompt, params))

    def astream(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> AsyncIterator[Completion]:
        """As `stream`, for an event loop."""
        params = sampling_params(sampling, reuse or self.reuse)
        return stream_async(self._loop.submit, self._parts(prompt, params))

    @property
    def has_tiers(self) -> bool:
        """Whether whole prompts are looked up before they are answered."""
        return self._llm is not None and self._llm.prompt_lookup is not None

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
        wishes = {PARAMS_KEY: (reuse or self.reuse).to_mapping()}
        return self._loop.call(
            score(self._running(), self._request_id(), prompt, answer, top, wishes)
        )

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
        template = self._chat_settings.args.chat_template
        return self._loop.call(rendered(self._running(), prompt, template))

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
        return self._loop.call(self._service.answer(prompt, fields or {}, reuse or self.reuse))

    async def arespond(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> dict[str, Any]:
        """As `respond`, for an event loop; cancelling it aborts the request."""
        answering = self._service.answer(prompt, fields or {}, reuse or self.reuse)
        return await asyncio.wrap_future(self._loop.submit(answering))

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
        opening = self._service.open(prompt, fields or {}, reuse or self.reuse)
        return Stream(self._loop.submit, self._loop.call(opening))

    async def arespond_stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """As `respond_stream`, for an event loop."""
        opening = self._service.open(prompt, fields or {}, reuse or self.reuse)
        chunks = await asyncio.wrap_future(self._loop.submit(opening))
        return stream_async(self._loop.submit, chunks)

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether messages can be answered."""
        return self._chat_settings.has_template(self.tokenizer)

    @property
    def supports_tools(self) -> bool:
        """Whether the model's own tool calls are understood, by `chat_args`."""
        return self._chat_settings.supports_tools

    @property
    def supports_images(self) -> bool:
        """Whether messages may hold images."""
        return self._chat_settings.supports_images

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's prefix cache (L0); False when a request under way holds part of it."""
        return bool(self._loop.call(self._running().reset_prefix_cache()))

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
        self._prompt_lookup().observe(prompt, where, source_version)

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
        if explored is None:
            return False
        return self._prompt_lookup().cascade.record(explored, correct=correct)

    def _prompt_lookup(self) -> PromptLookup:
        lookup = self._running().prompt_lookup
        if not isinstance(lookup, PromptLookup):
            raise EngineError(
                "no tiers: pass store=… and tiers=TierOptions()"
                if self.gate.servable
                else f"this model cannot be served with reuse: {self.gate.reason}"
            )
        return lookup

    # ---- what they share -------------------------------------------------------------------

    async def _answer(self, prompt: Prompt, params: Any) -> Completion:
        return join([part async for part in self._parts(prompt, params)])

    async def _parts(self, prompt: Prompt, params: Any) -> AsyncIterator[Completion]:
        llm, request_id = self._running(), self._request_id()
        async for part in parts(llm, prompt, params, request_id, self.plain_report):
            yield part

    def plain_report(self, prompt_tokens: int) -> ReuseReport:
        """The report of an answer that came without one, because no connector runs."""
        reason = None if self._connected else f"no reuse: {self.gate.reason}"
        return ReuseReport(kv_cache="skip", prompt_tokens=prompt_tokens, reason=reason)

    def _running(self) -> ReportingLLM:
        if self._llm is None:
            raise EngineError("the engine is closed")
        return self._llm

    def _request_id(self) -> str:
        return f"semkv-{next(self._ids)}"

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine process and close the store. Requests under way are aborted."""
        if (handler := getattr(self, "_at_exit", None)) is not None:
            atexit.unregister(handler)
        if self._llm is not None:
            if self._llm.prompt_lookup is not None:
                self._llm.prompt_lookup.close()
            if self._loop.running:
                self._loop.call(_shut_down(self._llm))
        self._loop.close()
        self._llm = None
        if self.store is not None:
            self.store.close()


async def _shut_down(llm: ReportingLLM) -> None:
    llm.shutdown()


def _close(reference: weakref.ref[Engine]) -> None:
    if (engine := reference()) is not None:
        engine.close()
