"""A request's fields: OpenAI's for messages, and what becomes of them for plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semkv_rag.errors import OptionError
from semkv_rag.llm.types import Prompt
from semkv_rag.wire import TRANSFER_FIELD

# What the backend writes itself.
_OWN = ("messages", "prompt", "model", "stream", "stream_options", "request_id", TRANSFER_FIELD)
_NEED_MESSAGES = ("tools", "tool_choice", "parallel_tool_calls")


def request_fields(prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as the prompt's endpoint names them.

    Raises:
        OptionError: one of them is not the caller's, or the endpoint has none like it.
    """
    if own := [name for name in _OWN if name in fields]:
        raise OptionError(f"{', '.join(own)}: leave it out, it is set for every request")
    if fields.get("n", 1) not in (None, 1):
        raise OptionError("n: ask several times for several answers")
    if not isinstance(prompt, str):
        return dict(fields)
    if tools := [name for name in _NEED_MESSAGES if fields.get(name)]:
        raise OptionError(f"{', '.join(tools)}: give messages, a text has no place for tools")
    given = {name: value for name, value in fields.items() if name not in _NEED_MESSAGES}
    if (most := given.pop("max_completion_tokens", None)) is not None:
        given["max_tokens"] = most
    # Here `logprobs` is a number; for messages it is a switch, and `top_logprobs` the number.
    top = given.pop("top_logprobs", None)
    if given.get("logprobs") is False:
        del given["logprobs"]
    elif given.get("logprobs") is True:
        given["logprobs"] = top or 1
    return given


def before(marker: str, text: str) -> str:
    """What stands in a prompt's text before a marker; empty where it is not in it."""
    beginning, found, _ = text.partition(marker)
    return beginning if found else ""
