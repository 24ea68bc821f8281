"""Both backends on real vLLM: the same answers in all ways to ask, and what was reused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.llm import Backend, LocalBackend, Message, Part, RemoteBackend
from semkv_rag.report import ReuseReport
from workbench.server import Server

FIELDS: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
ANSWER = "Ivan"


def report_of(part: Part) -> ReuseReport:
    assert part.report is not None
    return ReuseReport.from_mapping(part.report)


def messages_of(prompt: str) -> list[Message]:
    """The prompt as a conversation: the reader's template joins the messages with blanks."""
    context, question, rest = prompt.partition("Question :")
    return [
        {"role": "system", "content": context.strip()},
        {"role": "user", "content": [{"type": "text", "text": question + rest}]},
    ]


def check_whole(part: Part) -> None:
    assert part.text.strip() == ANSWER
    report = report_of(part)
    assert report.kv_cache == "hit"
    assert report.exact_tokens + report.reused_tokens > report.prompt_tokens / 2
    assert part.raw is not None
    assert part.raw["finish_reason"] == "stop"
    assert part.raw["usage"] == {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": report.prompt_tokens + 2,
    }


def check_stream(parts: list[Part]) -> None:
    assert "".join(part.text for part in parts).strip() == ANSWER
    assert [part.report for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert [part.raw for part in parts[:-1]] == [None] * (len(parts) - 1)
    check_whole(Part(ANSWER, report=parts[-1].report, raw=parts[-1].raw))


async def test_all_ways_to_ask(backend: Backend, prompt: str) -> None:
    for given in (prompt, messages_of(prompt)):
        check_whole(backend.answer(given, FIELDS, {}))
        check_whole(await backend.aanswer(given, FIELDS, {}))
        check_stream(list(backend.stream(given, FIELDS, {})))
        check_stream([part async for part in await backend.astream(given, FIELDS, {})])


def test_here_and_there_are_the_same(local: Backend, remote: Backend, prompt: str) -> None:
    fields = {**FIELDS, "logprobs": True, "top_logprobs": 3}
    for given in (prompt, messages_of(prompt)):
        here, there = (backend.answer(given, fields, {}) for backend in (local, remote))
        assert here.text == there.text
        assert report_of(here).chunk_ids == report_of(there).chunk_ids
        assert here.logprobs.keys() == there.logprobs.keys()
        names = [str(part.raw and part.raw["model"]) for part in (here, there)]
        assert names == [local.model_name, remote.model_name]
    assert local.context_window == remote.context_window == 1024
    assert local.fingerprint() == remote.fingerprint()
    assert local.store_id() != remote.store_id()
    assert local.count_tokens(prompt) == remote.count_tokens(prompt) > 50
    for backend in (local, remote):
        assert backend.has_chat_template
        assert not backend.supports_tools
        assert not backend.supports_images


def test_the_prefix_of_a_prompt(local: Backend, remote: Backend) -> None:
    text = "It is blue . school Question : ?"
    messages: list[Message] = [
        {"role": "system", "content": "It is blue ."},
        {"role": "user", "content": "school Question : ?"},
    ]
    for given in (text, messages):
        here, there = (backend.prefix_of(given, "school") for backend in (local, remote))
        assert here == there
        assert here.strip().endswith("It is blue .")
        assert local.prefix_of(given, "THERE") == ""


def test_options_of_a_request(backend: Backend, prompt: str) -> None:
    chosen = report_of(backend.answer(prompt, FIELDS, {"ratio": 0.4, "selector": "chunk_head"}))
    assert (chosen.ratio, chosen.selector) == (0.4, "chunk_head")
    assert 0.3 < chosen.recomputed_tokens / chosen.reused_tokens <= 0.45
    exact = report_of(backend.answer(prompt, FIELDS, {"preset": "exact", "selector": "chunk_head"}))
    assert (exact.ratio, exact.selector) == (1.0, "chunk_head")
    asked = {"preset": "fast", "selector": "query_attention", "question_tokens": 5}
    assert report_of(backend.answer(prompt, FIELDS, asked)).kv_cache == "hit"
    off = report_of(backend.answer(messages_of(prompt), FIELDS, {"enabled": False}))
    assert (off.kv_cache, off.reused_tokens) == ("skip", 0)
    long = backend.answer(prompt, {**FIELDS, "max_tokens": 6, "ignore_eos": True}, {})
    assert long.raw is not None and long.raw["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("streamed", [False, True])
def test_what_vllm_does_not_take(backend: Backend, prompt: str, streamed: bool) -> None:
    ask: Any = backend.stream if streamed else backend.answer
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for wrong, words in (
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": 5000}, "1024"),
        ({"tools": [tool]}, "tool_call_parser"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ):
        with pytest.raises(OptionError, match=words):
            ask(messages_of(prompt), {**FIELDS, **wrong}, {})
    with pytest.raises(OptionError, match="from 0 to 1"):
        ask(prompt, FIELDS, {"ratio": 2})
    with pytest.raises(OptionError, match="use one of fast, balanced, exact"):
        ask(prompt, FIELDS, {"preset": "best"})
    with pytest.raises(OptionError, match="1024"):
        ask("Question " * 2000, FIELDS, {})


def test_an_unknown_field_is_named(local: Backend, prompt: str) -> None:
    """A server passes it over, as OpenAI's does."""
    with pytest.raises(OptionError, match="no_such_field"):
        local.answer(prompt, {"no_such_field": 1}, {})


async def test_streams_can_be_left(backend: Backend, prompt: str) -> None:
    endless = {**FIELDS, "max_tokens": 200, "ignore_eos": True}
    stream = backend.stream(messages_of(prompt), endless, {})
    first = next(stream)
    stream.close()
    unread = backend.stream(prompt, endless, {})
    del unread
    parts = await backend.astream(prompt, endless, {})
    assert (await anext(parts)).text.startswith(first.text[:1])
    await parts.aclose()
    check_whole(await backend.aanswer(prompt, FIELDS, {}))


async def test_many_side_by_side(backend: Backend, prompt: str) -> None:
    alone = backend.answer(prompt, FIELDS, {}).text
    parts = await asyncio.gather(*(backend.aanswer(prompt, FIELDS, {}) for _ in range(16)))
    assert {part.text for part in parts} == {alone}


def test_sources_come_and_go(backend: Backend) -> None:
    told = []
    text = (
        "The Bru nal harbour is run by Petra . The Bru nal harbour has nine cranes and a school ."
    )
    ask = f"{text} Question : who runs Bru nal ? Answer :"
    assert report_of(backend.answer(ask, FIELDS, {})).kv_cache == "miss"
    result = backend.store_texts([("harbour", [text])], on_progress=told.append)
    assert (result.changed, result.chunks_captured, result.failures) == (1, 2, [])
    assert [told[0].phase, told[-1].phase] == ["reading", "computing"]
    assert report_of(backend.answer(ask, FIELDS, {})).kv_cache == "hit"
    again = backend.store_texts([("harbour", [text])])
    assert (again.unchanged, again.chunks_captured) == (1, 0)
    assert backend.forget(["harbour", "never stored"]) == 1
    assert backend.forget(["harbour"]) == 0
    assert report_of(backend.answer(ask, FIELDS, {})).kv_cache == "miss"


def test_texts_behind_the_one_before(backend: Backend) -> None:
    pair = ["The Vek tol mill has one wheel of oak .", "It was built by Nadia in 1988 ."]
    result = backend.store_texts([("mill", pair)], context=["prefix", "left"])
    assert result.chunks_captured == 4, "each text is there twice"
    for unknown in (["prefix", "right"], []):
        with pytest.raises(OptionError, match="use"):
            backend.store_texts([("mill", pair)], context=unknown)  # type: ignore[arg-type]
    assert backend.forget(["mill"]) == 1


def test_a_namespace_of_the_engine(local: Backend, namespace: str) -> None:
    text = "The Zor pel bridge was built by Anna . It has three arches and a toll house of stone ."
    local.store_texts([("bridge", [text])], namespace=namespace)
    ask = f"Say : {text}"
    assert report_of(local.answer(ask, FIELDS, {})).kv_cache == "miss"
    assert report_of(local.answer(ask, FIELDS, {"namespace": namespace})).kv_cache == "hit"
    assert local.forget(["bridge"]) == 0
    assert local.forget(["bridge"], namespace=namespace) == 1


def test_a_namespace_of_the_server_is_its_key_s(server: Server, remote: Backend) -> None:
    tenant = RemoteBackend(server.base_url, server.tenant_key)
    text = "The Kel dru tower was built by Omar . It has seven floors and a bell made of bronze ."
    assert tenant.store_texts([("tower", [text])]).changed == 1
    ask = f"Say : {text}"
    assert report_of(tenant.answer(ask, FIELDS, {})).kv_cache == "hit"
    assert report_of(remote.answer(ask, FIELDS, {})).kv_cache == "miss"
    assert tenant.store_id() != remote.store_id()
    assert tenant.fingerprint() == remote.fingerprint()
    assert remote.forget(["tower"]) == 0
    with pytest.raises(OptionError, match="comes from the server"):
        remote.forget(["tower"], namespace="tenant")
    with pytest.raises(OptionError, match="comes from the server"):
        remote.store_texts([("tower", [text])], namespace="tenant")
    assert tenant.forget(["tower"]) == 1


def test_who_is_not_let_in(server: Server) -> None:
    for key in (None, "another"):
        stranger = RemoteBackend(server.base_url, key)
        with pytest.raises(EngineError, match="401"):
            stranger.fingerprint()
        with pytest.raises(EngineError, match="401"):
            stranger.forget(["x"])
        with pytest.raises(EngineError, match="401"):
            stranger.store_texts([("x", ["y"])])


def test_no_server_and_no_such_model(server: Server, prompt: str) -> None:
    nobody = RemoteBackend("http://127.0.0.1:9/v1", timeout=1)
    for act in (
        lambda: nobody.answer(prompt, {}, {}),
        lambda: nobody.store_texts([("x", ["y"])]),
        nobody.store_id,
    ):
        with pytest.raises(EngineError, match="does not answer"):
            act()
    unknown = RemoteBackend(server.base_url, server.api_key, model="unknown")
    with pytest.raises(OptionError, match=f"it has {server.model}"):
        _ = unknown.context_window


def test_an_engine_without_a_store_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "store", None)
    backend = LocalBackend(engine)
    for act in (
        lambda: backend.store_texts([("x", ["y"])]),
        lambda: backend.forget(["x"]),
        backend.store_id,
    ):
        with pytest.raises(OptionError, match="without a store"):
            act()
