"""Both classes on an engine in this process: every way to ask, and what is told beside the text."""

from __future__ import annotations

from typing import Any

import pytest
from asking import SAMPLING, as_documents, plain, report, reused
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField
from langchain_semkv import ChatSemKV, SemKVLLM, close_engines
from pydantic import BaseModel

from semkv_rag.engine import Engine
from semkv_rag.errors import OptionError


class Joke(BaseModel):
    setup: str
    punchline: str


@pytest.fixture(scope="module")
def prompt(documents: list[str], question: str) -> str:
    context = "\n".join(document.page_content for document in as_documents(documents))
    return f"{context} Question : {question} Answer :"


@pytest.fixture
def chat(engine: Engine) -> ChatSemKV:
    return ChatSemKV(engine=engine, max_tokens=4)


@pytest.fixture
def llm(engine: Engine) -> SemKVLLM:
    return SemKVLLM(engine=engine, max_tokens=4)


def test_an_answer_tells_its_reuse_and_usage(
    engine: Engine, chat: ChatSemKV, prompt: str, answer: str
) -> None:
    engine.reset_prefix_cache()
    said = chat.invoke(prompt)
    assert said.text.strip() == answer
    about = said.response_metadata
    assert about["model_name"] == engine.model
    assert about["model_provider"] == "semkv"
    assert about["finish_reason"] == "stop"
    tokens = len(engine.tokenizer.encode(prompt))
    one = report(said)
    assert one.kv_cache == "hit"
    assert one.prompt_tokens == tokens
    usage = said.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == tokens
    assert usage["total_tokens"] == tokens + usage["output_tokens"]
    read = one.cached_tokens + reused(one) - one.recomputed_tokens
    assert usage["input_token_details"] == {"cache_read": read, "cache_creation": tokens - read}
    assert read > tokens / 2


def test_the_prefix_cache_counts_as_read(engine: Engine, chat: ChatSemKV, prompt: str) -> None:
    engine.reset_prefix_cache()
    first, second = (chat.invoke(prompt, reuse=False).usage_metadata for _ in range(2))
    assert first is not None and second is not None
    assert first["input_token_details"]["cache_read"] == 0
    assert second["input_token_details"]["cache_read"] > 0


def test_messages_go_through_the_template(chat: ChatSemKV, prompt: str, answer: str) -> None:
    context, mark, asked = prompt.partition("Question :")
    said = chat.invoke([SystemMessage(context.strip()), HumanMessage(mark + asked)])
    assert said.text.strip() == answer
    assert report(said).prompt_tokens == report(chat.invoke(prompt)).prompt_tokens


def test_a_stream_ends_with_the_report(chat: ChatSemKV, prompt: str, answer: str) -> None:
    chunks = list(chat.stream(prompt))
    assert len(chunks) >= 2
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert not any(chunk.usage_metadata for chunk in chunks[:-1])
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.text.strip() == answer
    assert report(whole).kv_cache == "hit"
    assert whole.usage_metadata == chunks[-1].usage_metadata


def test_a_stream_can_be_left_early(engine: Engine, prompt: str) -> None:
    endless = ChatSemKV(engine=engine, max_tokens=64, sampling={"ignore_eos": True})
    stream = endless.stream(prompt)
    first = next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert endless.invoke(prompt, max_tokens=4).text.startswith(first.text)


async def test_both_classes_agree_in_every_way(
    engine: Engine, chat: ChatSemKV, llm: SemKVLLM, prompt: str
) -> None:
    text = llm.invoke(prompt)
    assert text == chat.invoke(prompt).text
    assert text == (await chat.ainvoke(prompt)).text == await llm.ainvoke(prompt)
    assert text == "".join(llm.stream(prompt))
    assert text == "".join([part async for part in llm.astream(prompt)])
    assert text == "".join([part.text async for part in chat.astream(prompt)])
    assert [text] * 3 == llm.batch([prompt] * 3) == await llm.abatch([prompt] * 3)


def test_the_text_model_tells_it_in_generation_info(llm: SemKVLLM, prompt: str) -> None:
    result = llm.generate([prompt, prompt])
    infos = [generations[0].generation_info or {} for generations in result.generations]
    assert [info["semkv"]["kv_cache"] for info in infos] == ["hit", "hit"]
    assert result.llm_output is not None
    counted = sum(info["usage_metadata"]["input_tokens"] for info in infos)
    assert result.llm_output["token_usage"]["prompt_tokens"] == counted


async def test_events(chat: ChatSemKV, llm: SemKVLLM, prompt: str, answer: str) -> None:
    names = [event["event"] async for event in chat.astream_events(prompt, version="v2")]
    assert names[0] == "on_chat_model_start"
    assert names[-1] == "on_chat_model_end"
    assert names.count("on_chat_model_stream") >= 2
    ends = [event async for event in llm.astream_events(prompt, version="v2")]
    assert ends[-1]["event"] == "on_llm_end"
    message = chat.stream_events(prompt, version="v3").output
    assert message.text.strip() == answer
    assert message.response_metadata["semkv"]["kv_cache"] == "hit"


def test_options_of_a_call_stand_over_the_object_s(chat: ChatSemKV, prompt: str) -> None:
    chosen = report(chat.invoke(prompt, ratio=0.4, selector="chunk_head"))
    assert (chosen.ratio, chosen.selector) == (0.4, "chunk_head")
    bound: Any = chat.bind(reuse=False)
    assert report(bound.invoke(prompt)).kv_cache == "skip"
    assert report(chat.invoke(prompt, namespace="another")).kv_cache == "miss"
    ratio = ConfigurableField("ratio")
    again = chat.configurable_fields(ratio=ratio).with_config(configurable={"ratio": 0.7})
    said = again.invoke(prompt)
    assert isinstance(said, AIMessage)
    assert report(said).ratio == 0.7


def test_sampling_reaches_vllm(engine: Engine, prompt: str, answer: str) -> None:
    for model in (ChatSemKV, SemKVLLM):
        stopped: Any = model(engine=engine, max_tokens=6).invoke(prompt, stop=[answer])
        assert answer not in getattr(stopped, "text", stopped)
    said = ChatSemKV(engine=engine, **SAMPLING).invoke(prompt)
    assert (said.usage_metadata or {})["output_tokens"] == 8
    assert said.response_metadata["finish_reason"] == "length"
    odds = ChatSemKV(engine=engine, max_tokens=4).invoke(prompt, logprobs=True, top_logprobs=2)
    assert len(odds.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_tokens_are_the_model_s(engine: Engine, chat: ChatSemKV, llm: SemKVLLM) -> None:
    text = "The Mok pis school"
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    for model in (chat, llm):
        assert model.get_token_ids(text) == ids
        assert model.get_num_tokens(text) == len(ids)


@pytest.mark.parametrize("wrong", [{"ratio": 2}, {"no_such_field": 1}, {"top_p": 7}])
def test_faults_of_a_call_are_option_errors(
    chat: ChatSemKV, llm: SemKVLLM, prompt: str, wrong: dict[str, Any]
) -> None:
    for model in (chat, llm):
        with pytest.raises(OptionError):
            model.invoke(prompt, **wrong)
        with pytest.raises(OptionError):
            list(model.stream(prompt, **wrong))


def test_what_the_model_cannot_is_said(chat: ChatSemKV, prompt: str) -> None:
    with pytest.raises(OptionError, match="1024"):
        chat.invoke("Question " * 2000)
    with pytest.raises(OptionError, match="tool_call_parser"):
        chat.bind_tools([Joke]).invoke(prompt)
    picture = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
    with pytest.raises(OptionError):
        chat.invoke([HumanMessage([picture])])
    with pytest.raises(OptionError, match="cannot answer as another"):
        chat.invoke(prompt, model="another")


def test_structured_output_in_all_its_ways(taught: dict[str, Any]) -> None:
    llm = ChatSemKV(**taught)
    asked = "Tell me a joke about cats."
    for method in ("json_schema", "function_calling"):
        joke = llm.with_structured_output(Joke, method=method).invoke(asked)
        assert joke == Joke(setup="Why did the cat sit?", punchline="It was tired.")
    raw = llm.with_structured_output(Joke, include_raw=True).invoke(asked)
    assert isinstance(raw["raw"], AIMessage)
    assert raw["parsed"] == joke
    assert raw["parsing_error"] is None
    cut = llm.with_structured_output(Joke, include_raw=True, max_tokens=4).invoke(asked)
    assert cut["parsed"] is None
    assert cut["parsing_error"] is not None


def test_a_given_engine_stands_alone_and_stays_open(
    engine: Engine, chat: ChatSemKV, prompt: str
) -> None:
    with pytest.raises(OptionError, match="alone"):
        ChatSemKV(engine=engine, store="elsewhere")
    close_engines()
    assert chat.invoke(prompt).text


def test_reuse_off_is_plain_vllm(engine: Engine, prompt: str) -> None:
    expected = plain(engine, prompt)
    for model in (ChatSemKV, SemKVLLM):
        said: Any = model(engine=engine, reuse=False, **SAMPLING).invoke(prompt)
        assert getattr(said, "text", said) == expected
