"""LangChain's messages as OpenAI's, which is what chat templates and servers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages

from semkv_rag.errors import OptionError
from semkv_rag.llm import Message

# Of an earlier answer: its calls stand in `tool_calls` beside its content, and what a model thought is
# not said to it again.
_NOT_SAID_AGAIN = {
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_content",
    "tool_call",
    "tool_call_chunk",
    "invalid_tool_call",
    "function_call",
}


def to_openai(messages: Sequence[BaseMessage]) -> list[Message]:
    """The messages with text, images, audio, video, tool calls and tools' answers.

    Raises:
        OptionError: a content block is of a kind that OpenAI's messages do not have.
    """
    try:
        converted = convert_to_openai_messages([_prepared(message) for message in messages])
    except (ValueError, KeyError) as error:
        raise OptionError(f"a message cannot be sent: {error}") from error
    return cast("list[Message]", converted)


def _prepared(message: BaseMessage) -> BaseMessage:
    if isinstance(message.content, str):
        return message
    blocks = [
        _block(block)
        for block in message.content
        if not (isinstance(message, AIMessage) and _kind(block) in _NOT_SAID_AGAIN)
    ]
    return message.model_copy(update={"content": blocks})


def _kind(block: str | dict[str, Any]) -> str | None:
    return None if isinstance(block, str) else block.get("type")


def _block(block: str | dict[str, Any]) -> str | dict[str, Any]:
    """vLLM takes videos, and audio by address; OpenAI's own content parts lack them."""
    if isinstance(block, str):
        return block
    kind, url = block.get("type"), block.get("url")
    if kind == "video" and url is None and "base64" in block:
        url = f"data:{block.get('mime_type', 'video/mp4')};base64,{block['base64']}"
    if kind in ("video", "audio") and url is not None:
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    return block
