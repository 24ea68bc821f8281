"""`SemKV`: LlamaIndex's LLM interface over an engine in this process, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
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
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.llms.semkv.messages import (
    JoinedCalls,
    log_probabilities,
    offer,
    openai_choice,
    to_openai,
    tool_selections,
)
from llama_index.llms.semkv.options import SemKVOptions

from semkv_rag.llm import (
    Backend,
    Message,
    Part,
    Prompt,
)
from semkv_rag.llm.options import REUSE_FIELDS

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


REPORT_KEY = "semkv"
_MARKER = "THE RETRIEVED TEXTS"
"""Stands in a prompt where they will, to find out what stands before them."""


class SemKV(SemKVOptions):
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

    @classmethod
    def class_name(cls) -> str:
        return "SemKV"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model. The first call starts the engine."""
        backend = self.backend()
        return LLMMetadata(
            context_window=backend.context_window,
            num_output=self.max_tokens,
            is_chat_model=self._chats(backend),
            is_function_calling_model=self._templates(backend) and backend.supports_tools,
            model_name=backend.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """For instrumentation events, also within an event loop: so without asking the engine."""
        return {
            "class_name": self.class_name(),
            **self.model_dump(
                include={
                    "model",
                    "lora",
                    "base_url",
                    "max_tokens",
                    "temperature",
                    "reuse",
                    *REUSE_FIELDS,
                }
            ),
        }

    def count_tokens(self, text: str) -> int:
        """How many of the model's tokens a text is, without those it puts before every prompt."""
        return self.backend().count_tokens(text)

    def tokens(self, text: str) -> range:
        """As many numbers as the text has tokens: `Settings.tokenizer = llm.tokens`.

        With it LlamaIndex splits nodes and packs prompts in the model's own tokens.
        """
        return range(self.count_tokens(text))

    # ---- the eight methods -----------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        backend = self.backend()
        part = backend.answer(self._chat_prompt(backend, messages), *self._options(kwargs))
        return _chat_response(part, part.text, JoinedCalls())

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        backend = self.backend()
        given = self._completion_prompt(backend, prompt, formatted)
        part = backend.answer(given, *self._options(kwargs))
        return _completion_response(part, part.text)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        backend = self.backend()
        parts = backend.stream(self._chat_prompt(backend, messages), *self._options(kwargs))

        def responses() -> Generator[ChatResponse, None, None]:
            text, calls = "", JoinedCalls()
            for part in parts:
                text += part.text
                yield _chat_response(part, text, calls, delta=part.text)

        return responses()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        backend = self.backend()
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
        return _chat_response(part, part.text, JoinedCalls())

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
            text, calls = "", JoinedCalls()
            async for part in parts:
                text += part.text
                yield _chat_response(part, text, calls, delta=part.text)

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

    # ---- tools -----------------------------------------------------------------------------

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls that the model wants made.

        Raises:
            ValueError: there are none, and that was to be an error.
        """
        selections = tool_selections(response.message)
        if not selections and error_on_no_tool_call:
            raise ValueError(f"the model called no tool, it said: {response.message.content!r}")
        return selections

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            messages.append(ChatMessage(role=MessageRole.USER, content=user_msg))
        elif user_msg is not None:
            messages.append(user_msg)
        offered: dict[str, Any] = {}
        if tools:
            offered = offer(tools, openai_choice(tool_choice, tool_required))
            offered["parallel_tool_calls"] = allow_parallel_tool_calls
        return {"messages": messages, **offered, **kwargs}

    # ---- what they share -------------------------------------------------------------------

    def prefix_of(self, text_qa_template: BasePromptTemplate | None = None) -> str:
        """The text that a query engine's prompts start with, up to the retrieved texts.

        As the model sees it, chat template included.

        Args:
            text_qa_template: the query engine's own; None: LlamaIndex's default.
        """
        template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        filled = {**dict.fromkeys(template.template_vars, ""), "context_str": _MARKER}
        if self.metadata.is_chat_model:
            backend, prompt = self._ready_chat(self._get_messages(template, **filled))
        else:
            text = self._get_prompt(template, **filled)
            backend, prompt = self._ready_completion(text, formatted=True)
        return backend.prefix_of(prompt, _MARKER)

    def _chats(self, backend: Backend) -> bool:
        return backend.has_chat_template if self.is_chat_model is None else self.is_chat_model

    def _templates(self, backend: Backend) -> bool:
        """Whether messages go through the model's own template, tools and images with them."""
        return self.messages_to_prompt is generic_prompt and self._chats(backend)

    def _ready_chat(self, messages: Sequence[ChatMessage]) -> tuple[Backend, Prompt]:
        backend = self.backend()
        return backend, self._chat_prompt(backend, messages)

    def _ready_completion(self, prompt: str, formatted: bool) -> tuple[Backend, Prompt]:
        backend = self.backend()
        return backend, self._completion_prompt(backend, prompt, formatted)

    def _chat_prompt(self, backend: Backend, messages: Sequence[ChatMessage]) -> Prompt:
        """Through the caller's own `messages_to_prompt`, the chat template, or "role: content"."""
        if not self._templates(backend):
            assert self.messages_to_prompt is not None  # LLM's validators
            return self.messages_to_prompt(messages)
        images = backend.supports_images
        return [to_openai(message, images=images) for message in messages]

    def _completion_prompt(self, backend: Backend, prompt: str, formatted: bool) -> Prompt:
        """A formatted prompt as it is, another as a user's message of a chat model."""
        if formatted:
            return prompt
        assert self.completion_to_prompt is not None  # LLM's validators
        own = self.completion_to_prompt(prompt)
        if own != prompt or not self._chats(backend):
            return own
        return [Message(role=MessageRole.USER.value, content=prompt)]


def _extras(part: Part) -> dict[str, Any]:
    return {} if part.report is None else {REPORT_KEY: dict(part.report)}


def _chat_response(
    part: Part, text: str, calls: JoinedCalls, delta: str | None = None
) -> ChatResponse:
    calls.add(part.tool_calls)
    # The report is not put into the message: what is there becomes part of the next prompt.
    return ChatResponse(
        message=calls.message(text),
        delta=delta,
        raw=part.raw,
        logprobs=log_probabilities(part.logprobs),
        additional_kwargs=_extras(part),
    )


def _completion_response(part: Part, text: str, delta: str | None = None) -> CompletionResponse:
    return CompletionResponse(
        text=text,
        delta=delta,
        raw=part.raw,
        logprobs=log_probabilities(part.logprobs),
        additional_kwargs=_extras(part),
    )
