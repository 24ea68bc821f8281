"""OpenAI's requests in this process, answered by vLLM's own serving classes.

The very code that answers at a server: chat templates, tools, structured output and images are vLLM's,
and an answer here is the answer there. Only HTTP is left out. Messages go to `OpenAIServingChat`, text
to `OpenAIServingCompletion`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import State
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.caller import CALLER, Caller
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.forced_tools import configure_tools
from semkv_rag.engine.launch import takes_images
from semkv_rag.engine.streamed import with_report
from semkv_rag.engine.vllm_compat import (
    BaseFrontendArgs,
    make_arg_parser,
    validate_parsed_serve_args,
)
from semkv_rag.errors import EngineError, OptionError, SemKVError
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD


class ChatSettings:
    """What vLLM's chat is started with.

    Args:
        config: the engine's.
        model: the name the model is served under.
        chat_args: options of vLLM's server about chat, with `_` for `-`.

    Attributes:
        supports_tools: whether the model's own tool calls are understood.
        supports_images: whether messages may hold images.

    Raises:
        OptionError: an option is unknown, or cannot be used.
    """

    def __init__(self, config: VllmConfig, model: str, chat_args: Mapping[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(BaseFrontendArgs)}
        if unknown := set(chat_args) - known:
            raise OptionError(f"unknown chat_args {sorted(unknown)}: there are {sorted(known)}")
        parser = make_arg_parser(FlexibleArgumentParser())
        self.args: Namespace = parser.parse_args(["--model", model])
        for name, value in chat_args.items():
            setattr(self.args, name, value)
        self.args.structured_outputs_config = config.structured_outputs_config
        try:
            validate_parsed_serve_args(self.args)
            self.supports_tools = configure_tools(self.args)
        except (TypeError, ValueError) as error:
            raise OptionError(f"vLLM does not take these chat_args: {error}") from error
        self._model_config: ModelConfig = config.model_config
        self.supports_images = takes_images(config.model_config)

    def has_template(self, tokenizer: Any) -> bool:
        """Whether messages can be answered."""
        return has_chat_template(tokenizer, self.args.chat_template, self._model_config)


def has_chat_template(tokenizer: Any, given: str | None, config: ModelConfig) -> bool:
    """Whether there is a chat template: a given one, or one that comes with the model."""
    if given is not None or not hasattr(tokenizer, "get_chat_template"):
        return True  # tokenizers of other kinds (Mistral's) bring theirs in code
    return resolve_chat_template(tokenizer, None, None, model_config=config) is not None


class ChatService:
    """vLLM's serving classes over a running engine. All of it runs in the engine's loop.

    The classes are made when they are first needed, which takes some tenths of a second.
    """

    def __init__(self, llm: ReportingLLM, settings: ChatSettings) -> None:
        self._llm, self._settings = llm, settings
        self._made: State | None = None
        self._making = asyncio.Lock()

    async def _state(self) -> State:
        async with self._making:
            if self._made is None:
                state = State()
                tasks = await self._llm.get_supported_tasks()
                await init_app_state(self._llm, state, self._settings.args, tasks)
                self._made = state
            return self._made

    async def answer(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        reuse: ReuseOptions,
        lora: LoRARequest | None,
    ) -> dict[str, Any]:
        """OpenAI's whole response, as its JSON. Runs in a task of its own.

        Args:
            prompt: text or messages.
            fields: the request's further fields.
            reuse: the request's options.
            lora: the adapter that answers; None for the model alone.

        Raises:
            OptionError: vLLM does not take the request, or the adapter.
            EngineError: the engine stopped.
        """
        CALLER.set(Caller(reuse.namespace, reuse))
        with _errors():
            response = await self._create(self._request(prompt, fields, reuse, lora), lora)
        answer: dict[str, Any] = response.model_dump()
        return answer

    async def open(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        reuse: ReuseOptions,
        lora: LoRARequest | None,
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of OpenAI's streamed response, the report in the one that ends it.

        As `answer`; the request is checked before this returns. The chunks are for one task.
        """
        caller = Caller(reuse.namespace, reuse)
        CALLER.set(caller)
        with _errors():
            streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
            events = await self._create(self._request(prompt, streamed, reuse, lora), lora)
        return self._chunks(events, caller)

    async def _chunks(
        self, events: AsyncIterator[str], caller: Caller
    ) -> AsyncIterator[dict[str, Any]]:
        CALLER.set(caller)  # of the task that reads
        async for event in events:
            data = event.removeprefix("data: ").strip()
            if data == "[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise _fault(chunk["error"])
            yield with_report(chunk, caller.report)

    def _request(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        reuse: ReuseOptions,
        lora: LoRARequest | None,
    ) -> Any:
        kind: Any = CompletionRequest if isinstance(prompt, str) else ChatCompletionRequest
        if unknown := fields.keys() - kind.model_fields.keys():
            raise OptionError(f"vLLM has no such field: {', '.join(sorted(unknown))}")
        own = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return kind.model_validate(
            {
                **fields,
                **own,
                "model": self._settings.args.model if lora is None else lora.lora_name,
                TRANSFER_FIELD: {PARAMS_KEY: reuse.to_mapping()},
            }
        )

    async def _create(self, request: Any, lora: LoRARequest | None) -> Any:
        state = await self._state()
        if lora is not None:
            await self._llm.load_adapter(lora)
            _name(lora, state.openai_serving_models)
        if isinstance(request, CompletionRequest):
            response = await state.openai_serving_completion.create_completion(request)
        else:
            response = await state.openai_serving_chat.create_chat_completion(request)
        if isinstance(response, ErrorResponse):
            raise _fault(response.error.model_dump())
        return response


def _name(lora: LoRARequest, served: Any) -> None:
    """Have vLLM's serving classes know an adapter by its name.

    Raises:
        OptionError: they know another one by it.
    """
    known = served.lora_requests.setdefault(lora.lora_name, lora)
    if (known.lora_int_id, known.lora_path) != (lora.lora_int_id, lora.lora_path):
        raise OptionError(
            f"two LoRA adapters are named {lora.lora_name}: {known.lora_path} and {lora.lora_path}"
        )


@contextmanager
def _errors() -> Iterator[None]:
    """vLLM's errors as this package's, told apart as its server does."""
    try:
        yield
    except (SemKVError, asyncio.CancelledError):
        raise
    except EngineDeadError as error:
        raise EngineError(f"vLLM's engine stopped: {error}") from error
    except Exception as error:
        raise _fault(create_error_response(error).error.model_dump()) from error


def _fault(error: Mapping[str, Any]) -> SemKVError:
    if 400 <= int(error["code"]) < 500:
        return OptionError(f"vLLM does not take this request: {error['message']}")
    return EngineError(f"vLLM failed: {error['message']}")
