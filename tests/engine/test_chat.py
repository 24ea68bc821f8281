"""vLLM's own chat in this process: tools, structured output and images, whole and streamed.

On a tiny random model that takes images. What it says is made sure of by structured output: a grammar
decides, and vLLM's parsers read it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from semkv_rag.corpus import precompute_texts
from semkv_rag.corpus.chat_prefix import chat_prefix
from semkv_rag.engine import Engine
from semkv_rag.engine.chat import ChatService, ChatSettings
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.llm import LocalBackend, Part
from semkv_rag.report import ReuseReport
from workbench.engines import Engines
from workbench.tiny_models import IMAGE_SIZE, PATCH_SIZE

SCHEMA = {
    "type": "object",
    "properties": {"floor": {"enum": [1, 2]}, "lit": {"type": "boolean"}},
    "required": ["floor", "lit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("look", "climb")
]
NAMED = {"type": "function", "function": {"name": "climb"}}
CALL = '<tool_call>{"name": "look", "arguments": {"floor": 2, "lit": true}}</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "who owns this harbour"}]
GREEDY: dict[str, Any] = {"max_tokens": 120, "temperature": 0}


@pytest.fixture(scope="module")
def backend(llava: Engine) -> LocalBackend:
    return LocalBackend(llava)


def joined(parts: list[Part]) -> tuple[str, list[dict[str, Any]]]:
    """A stream's text, and its calls joined by index as clients do."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        for delta in part.tool_calls:
            call = calls.setdefault(delta["index"], {"id": None, "name": "", "arguments": ""})
            call["id"] = delta.get("id") or call["id"]
            call["name"] += delta.get("function", {}).get("name") or ""
            call["arguments"] += delta.get("function", {}).get("arguments") or ""
    return "".join(part.text for part in parts), [calls[index] for index in sorted(calls)]


def check_calls(backend: LocalBackend, fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and arguments of each call, the same in all ways to ask."""
    whole = backend.answer(ASK, fields, {})
    said = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in whole.tool_calls
    ]
    assert whole.report is not None and whole.report["kv_cache"] == "miss"
    assert all(call["id"] for call in whole.tool_calls)
    parts = list(backend.stream(ASK, fields, {}))
    text, calls = joined(parts)
    assert text == whole.text
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == said
    assert all(call["id"] for call in calls)
    assert parts[-1].report is not None
    return said


def test_it_says_what_it_can(backend: LocalBackend) -> None:
    assert backend.supports_tools
    assert backend.supports_images
    assert backend.has_chat_template


def test_the_model_s_own_call_is_read(backend: LocalBackend) -> None:
    exactly = {"regex": CALL.replace("{", r"\{").replace("}", r"\}")}
    fields = {**GREEDY, "tools": TOOLS, "structured_outputs": exactly}
    assert check_calls(backend, fields) == [("look", {"floor": 2, "lit": True})]
    whole = backend.answer(ASK, fields, {})
    assert whole.raw is not None and whole.raw["finish_reason"] == "tool_calls"


def test_a_call_and_its_result_are_part_of_a_conversation(backend: LocalBackend) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    talk: list[Any] = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the store", "tool_call_id": "c1"},
    ]
    part = backend.answer(talk, {"max_tokens": 4, "tools": TOOLS, "tool_choice": "none"}, {})
    assert part.text and not part.tool_calls
    assert (
        report(part).prompt_tokens
        > report(backend.answer(ASK, {"max_tokens": 1}, {})).prompt_tokens
    )


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "structured_outputs"],
)
def test_structured_output(backend: LocalBackend, fields: dict[str, Any]) -> None:
    for given in (ASK, "who owns this harbour"):
        whole = backend.answer(given, {**GREEDY, **fields}, {})
        assert set(json.loads(whole.text)) == {"floor", "lit"}
        text, calls = joined(list(backend.stream(given, {**GREEDY, **fields}, {})))
        assert (text, calls) == (whole.text, [])


def test_structured_output_of_the_engine_s_own_way(backend: LocalBackend) -> None:
    choice = {"max_tokens": 20, "structured_outputs": {"choice": ["the store", "the river"]}}
    answer = backend._engine.generate("where", sampling=choice)
    assert answer.text in ("the store", "the river")


@pytest.fixture
def unnamed(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    """The same engine, as if nothing had been said of how its model writes tool calls."""
    engine = backend._engine
    assert engine._llm is not None
    settings = ChatSettings(engine._llm.vllm_config, engine.model, {})
    assert not settings.supports_tools
    monkeypatch.setattr(engine, "_chat_settings", settings)
    monkeypatch.setattr(engine, "_service", ChatService(engine._llm, settings))
    return backend


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_forced_calls_need_no_parser(unnamed: LocalBackend, choice: Any) -> None:
    fields = {**GREEDY, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    said = check_calls(unnamed, fields)
    assert said
    for name, arguments in said:
        assert name == "climb" or choice == "required"
        assert set(arguments) == {"floor", "lit"}


def test_a_choice_needs_one(unnamed: LocalBackend) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        for ask in (unnamed.answer, unnamed.stream):
            with pytest.raises(OptionError, match=r"chat_args=.*tool_call_parser"):
                ask(ASK, {**GREEDY, "tools": TOOLS, **choice}, {})
    none = unnamed.answer(ASK, {"max_tokens": 4, "tools": TOOLS, "tool_choice": "none"}, {})
    assert none.text and not none.tool_calls
    text, calls = joined(list(unnamed.stream(ASK, {"max_tokens": 4, "temperature": 0}, {})))
    assert text == unnamed.answer(ASK, {"max_tokens": 4, "temperature": 0}, {}).text
    assert calls == []


# ---- images ------------------------------------------------------------------------------------

TEXT = (
    "the store keeps the keys and values of each chunk layer by layer in one file and a question "
    "about the colour of the car is answered from documents that were found for it"
)


def image(red: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (80, 60), (red, 40, 90)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask_with(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "who owns it"}]}]


def report(part: Part) -> ReuseReport:
    assert part.report is not None
    return ReuseReport.from_mapping(part.report)


def test_a_prompt_with_an_image_is_blended_before_and_behind_it(backend: LocalBackend) -> None:
    text = {"type": "text", "text": TEXT}
    # As they stand in a prompt: an image's place is filled with as many `<image>` tokens.
    placeholders = "<image>" * (IMAGE_SIZE // PATCH_SIZE) ** 2 + " " + TEXT
    result = backend.store_texts([("text", [TEXT]), ("image and text", [placeholders])])
    assert result.chunks_captured == 4
    fields = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}

    only_text = backend.answer(ask_with(text), fields, {})
    assert report(only_text).reused_tokens > 10
    for given in (ask_with(text, image(10)), ask_with(image(10), text)):
        shown = backend.answer(given, fields, {"ratio": 1.0})
        off = backend.answer(given, fields, {"enabled": False})
        assert report(shown).kv_cache == "hit"
        assert report(shown).exact_tokens == 0
        assert 10 < report(shown).reused_tokens <= report(only_text).reused_tokens, (
            "no placeholders"
        )
        assert told(shown) == pytest.approx(told(off), abs=1e-4)
        *_, last = backend.stream(given, fields, {"ratio": 1.0})
        assert report(last).kv_cache == "hit"


def told(part: Part) -> dict[str, float]:
    """Each token of an answer, with its place, and its logprob."""
    assert part.logprobs is not None
    entries = enumerate(part.logprobs["content"])
    return {f"{place} {entry['token']}": entry["logprob"] for place, entry in entries}


def test_images_reach_the_model(backend: LocalBackend) -> None:
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    seen = [backend.answer(ask_with(image(red)), fields, {}).logprobs for red in (10, 240, 10)]
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]


def test_an_image_that_cannot_be_read(backend: LocalBackend) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(OptionError):
        backend.answer(ask_with(broken), {"max_tokens": 1}, {})


# ---- the rest ----------------------------------------------------------------------------------


def test_unknown_chat_args_are_named(reader: Path) -> None:
    with pytest.raises(OptionError, match="tool_call_parser"):
        Engine(str(reader), chat_args={"tool_parser": "hermes"})
    with pytest.raises(OptionError, match="tool-call-parser"):
        Engine(str(reader), chat_args={"enable_auto_tool_choice": True})


async def test_the_first_requests_come_together(backend: LocalBackend) -> None:
    """The serving classes are made once, by whoever comes first."""
    engine = backend._engine
    assert engine._llm is not None
    engine._service = ChatService(engine._llm, engine._chat_settings)
    parts = await asyncio.gather(*(backend.aanswer(ASK, {"max_tokens": 2}, {}) for _ in range(8)))
    assert len({(part.raw or {})["id"] for part in parts}) == 8


def test_an_engine_without_a_store_says_so_and_so_does_a_closed_one(
    engines: Engines, reader: Path
) -> None:
    engine = engines.own(reader, store=None)
    backend = LocalBackend(engine)
    # Nothing of ours runs there, and what vLLM's own prefix cache holds is counted all the same.
    long = "the store keeps the floor . " * 12
    tokens = engine.tokenizer(long).input_ids
    found = [
        engine.generate(tokens, sampling={"max_tokens": 1}).report.cached_tokens for _ in range(2)
    ]
    assert found[0] == 0 < found[1] < len(tokens)
    texts = [report(backend.answer(long, {"max_tokens": 1}, {})) for _ in range(2)]
    assert [one.cached_tokens for one in texts] == [found[1]] * 2
    assert (
        report(backend.answer(ASK, {"max_tokens": 1}, {})).reason == "no reuse: no store was given"
    )
    *_, last = backend.stream("text", {"max_tokens": 1}, {})
    assert report(last).kv_cache == "skip"
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        backend.answer(ASK, {}, {})
    with pytest.raises(EngineError, match="closed"):
        backend.stream("text", {}, {})


def test_a_message_behind_the_prompt_prefix_of_the_chat_template_is_reused_as_it_is(
    llava: Engine, namespace: str
) -> None:
    rule, passage = (
        "who owns this harbour and the store ?\n" * 4,
        "the store keeps the floor . " * 8,
    )
    prefix = chat_prefix(llava.tokenizer, rule)
    precompute_texts(llava, [("one", [passage])], namespace=namespace, prefix=prefix)
    message = {"role": "user", "content": f"{rule}{passage}Who?"}
    asked = LocalBackend(llava).answer([message], {"max_tokens": 1}, {"namespace": namespace})
    tokens = llava.tokenizer.encode(prefix + passage, add_special_tokens=False)
    seen = report(asked)
    assert seen.exact_tokens + seen.cached_tokens >= len(tokens) - 1
    assert seen.recomputed_tokens == 0
