"""`SemKV`: LlamaIndex's LLM interface over an engine in this process, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM

from semkv_rag.backend import (
    Backend,
    LocalBackend,
    Message,
    Part,
    Prompt,
    RemoteBackend,
    shared_engine,
)
from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError

if TYPE_CHECKING:
    from semkv_rag.engine import Engine

REPORT_KEY = "semkv"
_REUSE_FIELDS = ("ratio", "selector", "check_layer", "namespace")


class SemKV(LLM):
    """A model in vLLM whose prompts take the KV of stored chunks out of a store.

    In this process with `model` and `store`: the engine is started at first use, and shared by all
    objects with the same model, store and engine arguments. With `engine`, one that runs already.
    With `base_url`, a server that was started with `semkv serve`.

    Each answer says what was reused in `additional_kwargs["semkv"]` (the fields of
    `semkv_rag.report.ReuseReport`), and tokens and times in `raw`; in a stream the last response has
    them. All options but those of the model itself can be given with a call too, and any further
    field of vLLM's `SamplingParams`: `llm.complete(prompt, ratio=0.3, top_p=0.9)`.

    Raises:
        OptionError: at construction, when an option cannot be used.
        MissingExtraError, StoreError, EngineError: at first use, when there is no engine to be had.

    Example:
        ```python
        llm = SemKV(model="Qwen/Qwen3-8B", store="kv-store")
        response = llm.complete("…")
        response.additional_kwargs["semkv"]["reused_tokens"]
        ```
    """

    model: str | None = Field(
        default=None,
        description="A folder or a hub name, as for vLLM; of a server, one of its models.",
    )
    store: str | None = Field(
        default=None, description="The store's folder; None answers as plain vLLM does."
    )
    index_url: str | None = Field(
        default=None, description="The store's SQL index, when it is not in its folder."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Fields of vLLM's AsyncEngineArgs."
    )
    base_url: str | None = Field(
        default=None, description="A server's address, up to and with /v1."
    )
    api_key: str | None = Field(
        default=None, description="The server's key.", exclude=True, repr=False
    )
    timeout: float = Field(
        default=60.0, gt=0, description="The most seconds a server may take to answer."
    )
    reuse: bool = Field(default=True, description="False answers as plain vLLM does.")
    ratio: float | None = Field(
        default=None, description="Recomputed reused tokens / reused tokens, 0 to 1."
    )
    selector: str | None = Field(
        default=None, description="The rule that picks the recomputed tokens."
    )
    check_layer: int | None = Field(
        default=None, description="The layer whose KV deviation is compared."
    )
    namespace: str | None = Field(default=None, description="The tenant whose chunks may be used.")
    max_tokens: int = Field(
        default=DEFAULT_NUM_OUTPUTS, gt=0, description="The most tokens of an answer."
    )
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    stop: list[str] = Field(
        default_factory=list, description="Texts that end an answer where they appear."
    )
    sampling: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of vLLM's SamplingParams."
    )
    is_chat_model: bool | None = Field(
        default=None, description="None: when the model has a chat template."
    )

    _engine: Engine | None = PrivateAttr(default=None)
    _remote: RemoteBackend | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | None = None,
        store: str | Path | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """See the class's fields for the options; `engine` is an `Engine` that runs already."""
        if engine is not None:
            if (
                model
                or store
                or not options.keys().isdisjoint(("index_url", "engine_args", "base_url"))
            ):
                raise OptionError("engine= has its model and store: give it alone")
            model = engine.model
        try:
            super().__init__(
                **{"model": model, "store": None if store is None else str(store), **options}
            )
        except ValidationError as error:
            raise OptionError(_in_words(error)) from error
        self._engine = engine
        if self.base_url is not None:
            self._remote = RemoteBackend(self.base_url, self.api_key, self.model, self.timeout)

    @model_validator(mode="after")
    def _check_options(self) -> SemKV:
        if self.base_url is None and self.model is None:
            raise OptionError("give a model, an engine or a base_url")
        if self.base_url is not None and (self.store or self.index_url or self.engine_args):
            raise OptionError("with base_url, the store and the engine are the server's")
        ReuseOptions.from_mapping(self._reuse_options({}))
        return self

    @classmethod
    def class_name(cls) -> str:
        return "SemKV"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model. The first call starts the engine."""
        backend = self._backend()
        return LLMMetadata(
            context_window=backend.context_window,
            num_output=self.max_tokens,
            is_chat_model=self._chats(backend),
            model_name=backend.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """For instrumentation events, also within an event loop: so without asking the engine."""
        return {
            "class_name": self.class_name(),
            **self.model_dump(
                include={"model", "base_url", "max_tokens", "temperature", "reuse", *_REUSE_FIELDS}
            ),
        }

    # ---- the eight methods -----------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        backend = self._backend()
        part = backend.answer(self._chat_prompt(backend, messages), *self._options(kwargs))
        return _chat_response(part, part.text)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        backend = self._backend()
        given = self._completion_prompt(backend, prompt, formatted)
        part = backend.answer(given, *self._options(kwargs))
        return _completion_response(part, part.text)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        backend = self._backend()
        parts = backend.stream(self._chat_prompt(backend, messages), *self._options(kwargs))

        def responses() -> Generator[ChatResponse, None, None]:
            text = ""
            for part in parts:
                text += part.text
                yield _chat_response(part, text, delta=part.text)

        return responses()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        backend = self._backend()
        given = self._completion_prompt(backend, prompt, formatted)
        parts = backend.stream(given, *self._options(kwargs))

        def responses() -> Generator[CompletionResponse, None, None]:
            text = ""
            for part in parts:
                text += part.text
                yield _completion_response(part, text, delta=part.text)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        backend, prompt = await asyncio.to_thread(self._ready_chat, messages)
        part = await backend.aanswer(prompt, *self._options(kwargs))
        return _chat_response(part, part.text)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        backend, given = await asyncio.to_thread(self._ready_completion, prompt, formatted)
        part = await backend.aanswer(given, *self._options(kwargs))
        return _completion_response(part, part.text)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        backend, prompt = await asyncio.to_thread(self._ready_chat, messages)
        parts = await backend.astream(prompt, *self._options(kwargs))

        async def responses() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            async for part in parts:
                text += part.text
                yield _chat_response(part, text, delta=part.text)

        return responses()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        backend, given = await asyncio.to_thread(self._ready_completion, prompt, formatted)
        parts = await backend.astream(given, *self._options(kwargs))

        async def responses() -> AsyncGenerator[CompletionResponse, None]:
            text = ""
            async for part in parts:
                text += part.text
                yield _completion_response(part, text, delta=part.text)

        return responses()

    # ---- what they share -------------------------------------------------------------------

    def _backend(self) -> Backend:
        """What answers. The first call starts the engine or asks the server: it takes a while."""
        if self._remote is not None:
            return self._remote
        if self._engine is not None:
            return LocalBackend(self._engine)
        assert self.model is not None  # _check_options
        return LocalBackend(shared_engine(self.model, self.store, self.index_url, self.engine_args))

    def _chats(self, backend: Backend) -> bool:
        return backend.has_chat_template if self.is_chat_model is None else self.is_chat_model

    def _ready_chat(self, messages: Sequence[ChatMessage]) -> tuple[Backend, Prompt]:
        backend = self._backend()
        return backend, self._chat_prompt(backend, messages)

    def _ready_completion(self, prompt: str, formatted: bool) -> tuple[Backend, Prompt]:
        backend = self._backend()
        return backend, self._completion_prompt(backend, prompt, formatted)

    def _chat_prompt(self, backend: Backend, messages: Sequence[ChatMessage]) -> Prompt:
        """Through the caller's own `messages_to_prompt`, the chat template, or "role: content"."""
        own = self.messages_to_prompt
        assert own is not None  # LLM's validators
        if own is not generic_prompt or not self._chats(backend):
            return own(messages)
        return [_message(message) for message in messages]

    def _completion_prompt(self, backend: Backend, prompt: str, formatted: bool) -> Prompt:
        """A formatted prompt as it is, another as a user's message of a chat model."""
        if formatted:
            return prompt
        assert self.completion_to_prompt is not None  # LLM's validators
        own = self.completion_to_prompt(prompt)
        if own != prompt or not self._chats(backend):
            return own
        return [Message(role=MessageRole.USER.value, content=prompt)]

    def _options(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sampling parameters and reuse options: this object's with a call's over them."""
        reuse = self._reuse_options(kwargs)
        ReuseOptions.from_mapping(reuse)
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **({"stop": self.stop} if self.stop else {}),
            **self.sampling,
            **{key: value for key, value in kwargs.items() if key not in ("reuse", *_REUSE_FIELDS)},
        }
        return sampling, reuse

    def _reuse_options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those that were set; the others are the engine's or the server's to choose."""
        options = {name: kwargs.get(name, getattr(self, name)) for name in _REUSE_FIELDS}
        given = {name: value for name, value in options.items() if value is not None}
        if not kwargs.get("reuse", self.reuse):
            given["enabled"] = False
        return given


def _message(message: ChatMessage) -> Message:
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise OptionError(f"a message has a {block.block_type} block: SemKV takes text")
    return Message(role=message.role.value, content=message.content or "")


def _extras(part: Part) -> dict[str, Any]:
    return {} if part.report is None else {REPORT_KEY: dict(part.report)}


def _chat_response(part: Part, text: str, delta: str | None = None) -> ChatResponse:
    # Not into the message: its additional_kwargs would become part of the next prompt.
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=text),
        delta=delta,
        raw=part.raw,
        additional_kwargs=_extras(part),
    )


def _completion_response(part: Part, text: str, delta: str | None = None) -> CompletionResponse:
    return CompletionResponse(text=text, delta=delta, raw=part.raw, additional_kwargs=_extras(part))


def _in_words(error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        place = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        faults.append(f"{place}: {message}" if place else message)
    return "; ".join(faults)
