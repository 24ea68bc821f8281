"""LlamaIndex's chat messages as OpenAI's, and answers back: text, images and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ContentBlock,
    ImageBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools.types import BaseTool

from semkv_rag.errors import OptionError
from semkv_rag.llm import Message, ToolCall

# Where LlamaIndex's own programs look for a streamed answer's calls.
TOOL_CALLS_KEY = "tool_calls"
TOOL_CALL_ID_KEY = "tool_call_id"

_ROLES = {MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}
# Said to other services, or by a model to itself: not for the prompt.
_LEFT_OUT = (CachePoint, ThinkingBlock)


def to_openai(message: ChatMessage, *, images: bool) -> Message:
    """A chat message as OpenAI's API takes it.

    Args:
        images: whether the model takes images.

    Raises:
        OptionError: the message holds something that the model does not take.
    """
    parts: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            if not images:
                raise OptionError("a message has an image block: this model takes no images")
            parts.append(_image(block))
        elif isinstance(block, ToolCallBlock):
            calls.append(_call(block))
        elif not isinstance(block, _LEFT_OUT):
            raise OptionError(
                f"a message has a {block.block_type} block: SemKV takes text, images and tool calls"
            )
    made = Message(role=_ROLES.get(message.role, message.role.value))
    if all(part["type"] == "text" for part in parts):
        made["content"] = message.content or ("" if not calls else None)
    else:
        made["content"] = parts
    if calls:
        made["tool_calls"] = calls
    if (id_ := message.additional_kwargs.get(TOOL_CALL_ID_KEY)) and message.role == "tool":
        made["tool_call_id"] = id_
    return made


def _image(block: ImageBlock) -> dict[str, Any]:
    if block.url is not None:
        url = str(block.url)
    else:
        data = block.resolve_image(as_base64=True).read().decode()
        url = f"data:{block.image_mimetype or 'image/png'};base64,{data}"
    detail = {} if block.detail is None else {"detail": block.detail}
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def _call(block: ToolCallBlock) -> ToolCall:
    given = block.tool_kwargs
    return ToolCall(
        id=block.tool_call_id or "",
        type="function",
        function={
            "name": block.tool_name,
            "arguments": given if isinstance(given, str) else json.dumps(given),
        },
    )


class JoinedCalls:
    """Tool calls out of a stream's deltas, or out of one whole answer."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}

    def add(self, deltas: Iterable[ToolCall]) -> None:
        """Take in what a part of the answer adds."""
        for delta in deltas:
            index = delta.get("index", len(self._calls))
            call = self._calls.setdefault(
                index, ToolCall(id="", type="function", function={"name": "", "arguments": ""})
            )
            call["id"] = delta.get("id") or call["id"]
            function = delta.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""

    def message(self, text: str) -> ChatMessage:
        """The assistant's message so far."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        blocks: list[ContentBlock] = [] if calls and not text else [TextBlock(text=text)]
        blocks += [
            ToolCallBlock(
                tool_call_id=call["id"],
                tool_name=call["function"]["name"],
                tool_kwargs=call["function"]["arguments"],
            )
            for call in calls
        ]
        # Copies: the next delta must not change a response that was given out.
        copies = [{**call, "function": {**call["function"]}} for call in calls]
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=blocks,
            additional_kwargs={TOOL_CALLS_KEY: copies} if copies else {},
        )


def tool_selections(message: ChatMessage) -> list[ToolSelection]:
    """The calls of a message; arguments that are still being streamed as far as they go."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=_arguments(block.tool_kwargs),
        )
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _arguments(given: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        parsed = parse_partial_json(given)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def openai_choice(wanted: str | Mapping[str, Any] | None, required: bool) -> Any:
    """OpenAI's `tool_choice` out of LlamaIndex's: a mode, a tool's name, or nothing said."""
    if wanted is None:
        return "required" if required else "auto"
    if isinstance(wanted, str) and wanted not in ("none", "auto", "required"):
        if wanted == "any":
            return "required"
        return {"type": "function", "function": {"name": wanted}}
    return wanted


def offer(tools: Iterable[BaseTool], choice: Any) -> dict[str, Any]:
    """The fields that offer tools to the model.

    Args:
        choice: OpenAI's `tool_choice`. A call that is forced gets arguments that fit the tool: vLLM
            lets them be anything otherwise. Where the model chooses, it writes them as it learnt to.
    """
    described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
    if choice not in ("none", "auto"):
        for tool in described:
            tool["function"]["strict"] = True
    return {"tools": described, "tool_choice": choice}


def log_probabilities(given: Any) -> list[list[LogProb]] | None:
    """By answer token, its likeliest alternatives; out of OpenAI's two shapes."""
    if not isinstance(given, Mapping):
        return None
    if (content := given.get("content")) is not None:
        return [
            [_logprob(top) for top in token.get("top_logprobs") or [token]] for token in content
        ]
    tops = given.get("top_logprobs") or [None] * len(given.get("tokens") or ())
    own: Sequence[tuple[str, float | None]] = list(
        zip(given.get("tokens") or (), given.get("token_logprobs") or (), strict=False)
    )
    return [
        [
            LogProb(token=text, logprob=value or 0.0, bytes=list(text.encode()))
            for text, value in (top or {token: logprob}).items()
        ]
        for (token, logprob), top in zip(own, tops, strict=False)
    ]


def _logprob(entry: Mapping[str, Any]) -> LogProb:
    return LogProb(
        token=entry["token"], logprob=entry["logprob"], bytes=list(entry.get("bytes") or ())
    )
