"""A LlamaIndex LLM over plain vLLM, written for the tests and sharing nothing with `SemKV`.

Every call is `Engine.generate` with reuse switched off and an empty prefix cache.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine


class PlainLLM(CustomLLM):
    """What `SemKV` must answer as."""

    max_tokens: int
    chats: bool

    _engine: Engine = PrivateAttr()

    def __init__(self, engine: Engine, max_tokens: int, chats: bool) -> None:
        super().__init__(max_tokens=max_tokens, chats=chats)  # type: ignore[call-arg]
        self._engine = engine

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self._engine.max_model_len,
            num_output=self.max_tokens,
            is_chat_model=self.chats,
        )

    def _answer(self, messages: Sequence[ChatMessage] | str) -> str:
        prompt: Any = messages
        if not isinstance(messages, str):
            tokenizer = self._engine.tokenizer
            given = [{"role": m.role.value, "content": m.content or ""} for m in messages]
            text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False)
        self._engine.reset_prefix_cache()
        sampling = {"max_tokens": self.max_tokens, "temperature": 0}
        return self._engine.generate(
            prompt, sampling=sampling, reuse=ReuseOptions(enabled=False)
        ).text

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        wrapped = self.chats and not formatted
        return CompletionResponse(
            text=self._answer([ChatMessage(content=prompt)] if wrapped else prompt)
        )

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        def parts() -> Generator[CompletionResponse, None, None]:
            text = self.complete(prompt, formatted=formatted).text
            yield CompletionResponse(text=text, delta=text)

        return parts()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        given = list(messages) if self.chats else self.messages_to_prompt(messages)
        return ChatResponse(message=ChatMessage(role="assistant", content=self._answer(given)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        def parts() -> Generator[ChatResponse, None, None]:
            message = self.chat(messages).message
            yield ChatResponse(message=message, delta=message.content)

        return parts()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        async def parts() -> AsyncGenerator[ChatResponse, None]:
            for part in self.stream_chat(messages):
                yield part

        return parts()
