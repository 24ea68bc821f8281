"""Structured prediction by vLLM's own structured output: the answer cannot but fit the schema."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model, PydanticProgramMode

from semkv_rag.errors import OptionError

dispatcher = get_dispatcher(__name__)


class StructuredPrediction(FunctionCallingLLM):
    """`structured_predict` and its kin, for every model that vLLM serves, with tools or without.

    The schema is told to the model at the end of the prompt and enforced by vLLM. Another
    `pydantic_program_mode` than the default takes LlamaIndex's own way.
    """

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """One object of `output_cls`.

        Raises:
            OptionError: `max_tokens` ended the answer before the object was whole.
            ValidationError: the object does not pass the class's own validators.
        """
        if not self._constrains():
            plain: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return plain
        dispatcher.event(_started(output_cls, prompt, prompt_args))
        given, fields = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        if isinstance(given, str):
            made = _whole(output_cls, self.complete(given, formatted=True, **fields))
        else:
            made = _whole(output_cls, self.chat(given, **fields))
        dispatcher.event(LLMStructuredPredictEndEvent(output=made))
        return made

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """As `structured_predict`, for an event loop."""
        if not self._constrains():
            plain: Model = await super().astructured_predict(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return plain
        dispatcher.event(_started(output_cls, prompt, prompt_args))
        given, fields = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        if isinstance(given, str):
            made = _whole(output_cls, await self.acomplete(given, formatted=True, **fields))
        else:
            made = _whole(output_cls, await self.achat(given, **fields))
        dispatcher.event(LLMStructuredPredictEndEvent(output=made))
        return made

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None, None]:
        if not self._constrains():
            yield from super()._structured_stream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return
        given, fields = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        objects = _Partials(output_cls)
        if isinstance(given, str):
            yield from map(objects.take, self.stream_complete(given, formatted=True, **fields))
        else:
            yield from map(objects.take, self.stream_chat(given, **fields))

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None]:
        if not self._constrains():
            return await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
        given, fields = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        objects = _Partials(output_cls)
        if isinstance(given, str):
            answers: AsyncGenerator[Any, None] = await self.astream_complete(
                given, formatted=True, **fields
            )
        else:
            answers = await self.astream_chat(given, **fields)

        async def partials() -> AsyncGenerator[Any, None]:
            async for answer in answers:
                yield objects.take(answer)

        return partials()

    def _constrains(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _request(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[str | list[ChatMessage], dict[str, Any]]:
        """The prompt with the schema in words, and the call's fields with the schema in force."""
        told = PydanticOutputParser(output_cls=output_cls)
        fields = {**(llm_kwargs or {})}
        fields.setdefault("structured_outputs", {"json": output_cls.model_json_schema()})
        if self.metadata.is_chat_model:
            messages = prompt.format_messages(llm=self, **prompt_args)
            return self._extend_messages(told.format_messages(messages)), fields
        text = prompt.format(
            llm=self,
            messages_to_prompt=self.messages_to_prompt,
            completion_to_prompt=self.completion_to_prompt,
            **prompt_args,
        )
        return self._extend_prompt(told.format(text)), fields


class _Partials:
    """A stream's object, as far as it is there."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._current: Any = None

    def take(self, answer: ChatResponse | CompletionResponse) -> Any:
        made = process_streaming_objects(answer, self._output_cls, cur_objects=self._current)
        self._current = made if isinstance(made, list) else [made]
        return made


def _started(
    output_cls: type[BaseModel], prompt: PromptTemplate, prompt_args: dict[str, Any]
) -> LLMStructuredPredictStartEvent:
    return LLMStructuredPredictStartEvent(
        output_cls=output_cls, template=prompt, template_args=prompt_args
    )


def _whole(output_cls: type[Model], answer: ChatResponse | CompletionResponse) -> Model:
    text = answer.message.content if isinstance(answer, ChatResponse) else answer.text
    try:
        return output_cls.model_validate_json(text or "")
    except ValidationError as error:
        if (answer.raw or {}).get("finish_reason") == "length":
            raise OptionError(
                f"max_tokens ended the answer before the {output_cls.__name__} was whole: raise it"
            ) from error
        raise
