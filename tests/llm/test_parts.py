"""Requests and responses in OpenAI's words: what is refused, renamed and kept."""

from __future__ import annotations

from typing import Any

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.llm.answers import StreamedAnswer, whole_part
from semkv_rag.llm.fields import request_fields

MESSAGES: list[Any] = [{"role": "user", "content": "?"}]
REPORT = {"kv_transfer_params": {"semkv": {"kv_cache": "hit"}}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "details": None}


@pytest.mark.parametrize(
    "name", ["messages", "prompt", "model", "stream", "stream_options", "kv_transfer_params"]
)
def test_what_the_backend_sets_is_not_the_caller_s(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        request_fields(MESSAGES, {name: None})


def test_one_answer_is_all_there_is() -> None:
    assert request_fields("text", {"n": 1}) == {"n": 1}
    with pytest.raises(OptionError, match="several times"):
        request_fields(MESSAGES, {"n": 2})


def test_tools_need_messages() -> None:
    tools = {"tools": [{"type": "function"}], "tool_choice": "auto"}
    assert request_fields(MESSAGES, tools) == tools
    with pytest.raises(OptionError, match="tools, tool_choice: give messages"):
        request_fields("text", tools)
    assert request_fields("text", {"tools": [], "tool_choice": None, "top_p": 1}) == {"top_p": 1}


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"logprobs": False, "top_logprobs": None}, {}),
        ({"logprobs": 4}, {"logprobs": 4}),
    ],
    ids=str,
)
def test_chat_s_names_are_taken_for_text(chat: dict[str, Any], text: dict[str, Any]) -> None:
    assert request_fields("text", chat) == text
    assert request_fields(MESSAGES, chat) == chat


def test_a_whole_answer_with_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    part = whole_part({"id": "x", "model": "m", "choices": [choice], "usage": USAGE, **REPORT})
    assert part.text == ""
    assert part.tool_calls == ({"index": 0, **call}, {"index": 1, **call, "id": "c2"})
    assert part.report == {"kv_cache": "hit"}
    assert part.raw is not None
    assert part.raw["finish_reason"] == "tool_calls"
    assert part.raw["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
    }


def test_an_answer_without_a_report_has_none() -> None:
    part = whole_part({"choices": [{"text": "a"}], "kv_transfer_params": None})
    assert (part.text, part.report) == ("a", None)


def test_a_stream_s_parts_and_its_end() -> None:
    answer = StreamedAnswer()
    common = {"id": "x", "model": "m"}
    first = answer.take({**common, "choices": [{"delta": {"role": "assistant", "content": ""}}]})
    assert first is None
    text = answer.take({**common, "choices": [{"delta": {"content": "a"}, "logprobs": {"c": 1}}]})
    assert text is not None and (text.text, text.logprobs) == ("a", {"c": 1})
    begun = {"index": 1, "id": "c1", "function": {"name": "look", "arguments": None}}
    delta = {"content": None, "tool_calls": [begun]}
    ending = {"delta": delta, "finish_reason": "tool_calls"}
    call = answer.take({**common, "choices": [ending], **REPORT})
    assert call is not None
    assert call.tool_calls == ({"index": 1, "id": "c1", "function": {"name": "look"}},)
    assert answer.take({**common, "choices": [], "usage": USAGE}) is None
    last = answer.last()
    assert (last.text, last.report) == ("", {"kv_cache": "hit"})
    assert last.raw is not None
    assert (last.raw["id"], last.raw["model"]) == ("x", "m")
    assert last.raw["finish_reason"] == "tool_calls"
    assert last.raw["usage"]["total_tokens"] == 5


def test_a_call_that_begins_and_goes_on_in_one_chunk_is_one() -> None:
    def delta(index: int, **function: str) -> dict[str, object]:
        return {"index": index, "function": function}

    named = {"id": "c1", "type": "function"}
    deltas = [
        {**delta(0, name="look"), **named},
        delta(0, arguments='{"a'),
        delta(0, arguments='": 1}'),
        {**delta(1, name="see", arguments="{}"), **named, "id": "c2"},
    ]
    part = StreamedAnswer().take({"choices": [{"delta": {"tool_calls": deltas}}]})
    assert part is not None
    look = {"name": "look", "arguments": '{"a": 1}'}
    see = {"name": "see", "arguments": "{}"}
    assert part.tool_calls == (
        {**named, "index": 0, "function": look},
        {**named, "id": "c2", "index": 1, "function": see},
    )
