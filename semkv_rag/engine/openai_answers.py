"""What an engine answers as OpenAI's API does, by vLLM's own serving classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm.lora.request import LoRARequest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.bridge import Stream, stream_async
from semkv_rag.engine.chat import ChatService, ChatSettings
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.loop import EngineLoop
from semkv_rag.engine.scoring import rendered
from semkv_rag.errors import EngineError


class OpenAIAnswers:
    """The part of `Engine` that takes messages, and OpenAI's fields.

    Attributes:
        reuse: the options of requests that bring none.
        tokenizer: the model's Hugging Face tokenizer.
    """

    reuse: ReuseOptions
    tokenizer: Any
    _loop: EngineLoop
    _llm: ReportingLLM | None
    _service: ChatService
    _chat_settings: ChatSettings

    def respond(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> dict[str, Any]:
        """Answer text or messages by vLLM's own OpenAI layer, as `semkv serve` does over HTTP.

        Args:
            prompt: text goes to the model as it is, messages through its chat template.
            fields: further fields of OpenAI's request, and vLLM's, such as `max_tokens`, `tools` or
                `response_format`.
            reuse: this request's options instead of the engine's.
            lora_request: as for `Engine.generate`. Each adapter needs a name of its own.

        Returns:
            OpenAI's response, with the reuse report under `["kv_transfer_params"]["semkv"]`.

        Raises:
            OptionError: a field, the prompt's length or the adapter cannot be used.
            EngineError: the engine stopped.
        """
        return self._loop.call(
            self._service.answer(prompt, fields or {}, reuse or self.reuse, lora_request)
        )

    async def arespond(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> dict[str, Any]:
        """As `respond`, for an event loop; cancelling it aborts the request."""
        answering = self._service.answer(prompt, fields or {}, reuse or self.reuse, lora_request)
        return await asyncio.wrap_future(self._loop.submit(answering))

    def respond_stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Stream[dict[str, Any]]:
        """As `respond`, chunk by chunk; the last one holds the report and no choices.

        The request is checked before this returns. Closing the stream aborts it.
        """
        opening = self._service.open(prompt, fields or {}, reuse or self.reuse, lora_request)
        return Stream(self._loop.submit, self._loop.call(opening))

    async def arespond_stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """As `respond_stream`, for an event loop."""
        opening = self._service.open(prompt, fields or {}, reuse or self.reuse, lora_request)
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

    def _running(self) -> ReportingLLM:
        if self._llm is None:
            raise EngineError("the engine is closed")
        return self._llm
