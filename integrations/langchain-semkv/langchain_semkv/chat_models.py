"""`ChatSemKV`: LangChain's chat model over an engine in this process, or a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    ToolCallChunk,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_semkv import structured
from langchain_semkv.answers import PROVIDER, metadata, usage
from langchain_semkv.base import SemKVModel
from langchain_semkv.messages import to_openai
from langchain_semkv.structured import Method, Schema
from semkv_rag.errors import OptionError
from semkv_rag.llm import Backend, Message, Part

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool
_Prepared = tuple[Backend, list[Message], dict[str, Any], dict[str, Any]]


class ChatSemKV(BaseChatModel, SemKVModel[AIMessage]):
    """A chat model in vLLM whose prompts take the KV of stored chunks out of a store.

    Messages go through the model's chat template, tools and structured output through vLLM's own
    support of them. `response_metadata["semkv"]` of an answer says what was reused (the fields of
    `semkv_rag.report.ReuseReport`), and `usage_metadata` how many of the prompt's tokens were
    `cache_read`, not computed. In a stream the last chunk has both.

    Every option but those of the model itself can be given with a call too, with `bind`, and any
    field of OpenAI's request or of vLLM's `SamplingParams` with it.

    Raises:
        OptionError: an option or a request cannot be used; it is a `ValueError`.
        EngineError: the engine or the server does not answer.

    Example:
        ```python
        llm = ChatSemKV(model="Qwen/Qwen3-8B", store="kv-store")
        answer = llm.invoke([("system", manual), ("human", "How is the pump started?")])
        answer.response_metadata["semkv"]["reused_tokens"]
        ```
    """

    @property
    def _llm_type(self) -> str:
        return "semkv-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """For traces: without asking the engine or the server."""
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params.setdefault("ls_model_name", self.model or self.base_url or "")
        if ends := self.stop if stop is None else stop:
            params["ls_stop"] = ends
        return params

    # ---- answering -------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        backend, prompt, fields, reuse = self._prepare(messages, stop, kwargs)
        return _result(backend.answer(prompt, fields, reuse))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        backend, prompt, fields, reuse = await self._aprepare(messages, stop, kwargs)
        return _result(await backend.aanswer(prompt, fields, reuse))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        backend, prompt, fields, reuse = self._prepare(messages, stop, kwargs)
        for part in backend.stream(prompt, fields, reuse):
            chunk = _chunk(part)
            if run_manager is not None:
                run_manager.on_llm_new_token(part.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        backend, prompt, fields, reuse = await self._aprepare(messages, stop, kwargs)
        async for part in await backend.astream(prompt, fields, reuse):
            chunk = _chunk(part)
            if run_manager is not None:
                await run_manager.on_llm_new_token(part.text, chunk=chunk)
            yield chunk

    def prefix_of(self, prompt: PromptValue, marker: str) -> str:
        return self.backend().prefix_of(to_openai(prompt.to_messages()), marker)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> _Prepared:
        """What answers, and what it is asked; everything that can be checked before is checked."""
        prompt = to_openai(messages)
        backend, fields, reuse = self._call(stop, kwargs)
        if not backend.has_chat_template:
            raise OptionError(
                f"{backend.model_name} has no chat template: give one with "
                'chat_args={"chat_template": "file.jinja"}, or use SemKVLLM, which takes text'
            )
        return backend, prompt, fields, reuse

    async def _aprepare(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> _Prepared:
        """As `_prepare`, which may have to start the engine: so not in the event loop."""
        return await asyncio.to_thread(self._prepare, messages, stop, kwargs)

    # ---- tools and structured output -------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools to call.

        Args:
            tools: functions, pydantic classes, `BaseTool`s or OpenAI's descriptions of functions.
            tool_choice: `auto` (the default; the engine then needs the model's tool parser, see
                `chat_args`), `none`, `any` or True for at least one call, or a tool's name. The last
                two work with every model: vLLM makes it answer in their form.
            strict: OpenAI's `strict` in each tool's description.
            parallel_tool_calls: False for at most one call in an answer.
            **kwargs: bound as with `bind`.

        Raises:
            OptionError: `tool_choice` names no tool.
        """
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if (choice := _tool_choice(tool_choice, described)) is not None:
            kwargs["tool_choice"] = choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=described, **kwargs)

    def with_structured_output(
        self,
        schema: Schema,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with answers of one form.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema with a title.
            method: `json_schema` (vLLM lets the model write nothing that does not fit),
                `function_calling` (a forced call of a tool of that form), or `json_mode` (any JSON:
                the prompt must say which).
            include_raw: give a dict of `raw`, `parsed` and `parsing_error` instead.
            strict: OpenAI's `strict`. False lets a forced call have any arguments.
            **kwargs: bound as with `bind`.

        Raises:
            OptionError: there is no such method, or `json_mode` was given `strict`.
        """
        structured.check_method(method)
        if method == "json_mode" and strict is not None:
            raise OptionError("json_mode knows no schema, so strict means nothing: leave it out")
        kwargs["ls_structured_output_format"] = structured.traced(schema, method, strict)
        model: Runnable[LanguageModelInput, AIMessage]
        if method == "function_calling":
            tool = structured.tool(schema, strict)
            model = self.bind_tools([tool], tool_choice=tool["function"]["name"], **kwargs)
        else:
            form = structured.response_format(schema, method, strict)
            model = self.bind(response_format=form, **kwargs)
        parser = structured.parser(schema, method)
        return structured.with_raw(model, parser) if include_raw else model | parser


def _tool_choice(
    choice: dict[str, Any] | str | bool | None, tools: Sequence[dict[str, Any]]
) -> dict[str, Any] | str | None:
    """OpenAI's form of it; None leaves it out."""
    if choice is None or choice is False:
        return None
    if choice is True or choice in ("any", "required"):
        return "required"
    if isinstance(choice, dict) or choice in ("auto", "none"):
        return choice
    names = [tool.get("function", {}).get("name") for tool in tools]
    if choice not in names:
        raise OptionError(f"tool_choice is {choice!r}: use auto, none, any or one of {names}")
    return {"type": "function", "function": {"name": choice}}


def _result(part: Part) -> ChatResult:
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in part.tool_calls:
        name, id_ = call["function"]["name"], call.get("id")
        arguments = call["function"].get("arguments") or "{}"
        try:
            args = json.loads(arguments)
            if not isinstance(args, dict):
                raise ValueError("the arguments are no JSON object")
            calls.append(tool_call(name=name, args=args, id=id_))
        except ValueError as error:
            invalid.append(invalid_tool_call(name=name, args=arguments, id=id_, error=str(error)))
    message = AIMessage(
        content=part.text,
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=usage(part),
        response_metadata=metadata(part),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(part: Part) -> ChatGenerationChunk:
    calls: list[ToolCallChunk] = []
    for call in part.tool_calls:
        function = call.get("function") or {}
        calls.append(
            tool_call_chunk(
                name=function.get("name"),
                args=function.get("arguments"),
                id=call.get("id"),
                index=call.get("index"),
            )
        )
    message = AIMessageChunk(
        content=part.text,
        tool_call_chunks=calls,
        usage_metadata=usage(part),
        response_metadata=metadata(part),
        chunk_position=None if part.raw is None else "last",
    )
    return ChatGenerationChunk(message=message)
