"""`SemKV` on an engine in this process: eight methods, one answer, and what was reused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole
from llama_index.llms.semkv import SemKV, close_engines

from semkv_rag.engine import Engine
from semkv_rag.errors import OptionError
from semkv_rag.report import ReuseReport


@pytest.fixture
def llm(engine: Engine) -> SemKV:
    return SemKV(engine=engine, max_tokens=4)


def _messages(prompt: str) -> list[ChatMessage]:
    """The prompt as a conversation: the reader's template joins the messages with blanks."""
    context, question, rest = prompt.partition("Question :")
    return [
        ChatMessage(role=MessageRole.SYSTEM, content=context.strip()),
        ChatMessage(role=MessageRole.USER, content=question + rest),
    ]


def _report(response: Any) -> ReuseReport:
    return ReuseReport.from_mapping(response.additional_kwargs["semkv"])


def _is_reuse(report: ReuseReport) -> bool:
    reused = report.exact_tokens + report.reused_tokens
    return report.kv_cache == "hit" and reused > report.prompt_tokens / 2


def test_metadata_is_the_model_s(llm: SemKV, engine: Engine) -> None:
    assert llm.metadata.context_window == engine.max_model_len == 1024
    assert llm.metadata.num_output == 4
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == engine.model
    assert not SemKV(engine=engine, is_chat_model=False).metadata.is_chat_model


def test_complete(llm: SemKV, prompt: str, answer: str) -> None:
    response = llm.complete(prompt)
    assert response.text.strip() == answer
    report = _report(response)
    assert _is_reuse(report)
    assert response.raw is not None
    usage = response.raw["usage"]
    assert usage["prompt_tokens"] == report.prompt_tokens
    assert usage["completion_tokens"] == 2
    assert usage["total_tokens"] == report.prompt_tokens + 2
    assert response.raw["finish_reason"] == "stop"
    assert response.raw["latency_ms"] > 0


def test_chat_is_the_same_prompt_through_the_template(llm: SemKV, prompt: str, answer: str) -> None:
    response = llm.chat(_messages(prompt))
    assert (response.message.content or "").strip() == answer
    assert response.message.role == MessageRole.ASSISTANT
    assert response.message.additional_kwargs == {}
    completed = llm.complete(prompt)
    assert _report(response).prompt_tokens == _report(completed).prompt_tokens
    assert _is_reuse(_report(response))


def _check_stream(responses: list[Any], texts: list[str], answer: str) -> None:
    assert len(responses) >= 2
    deltas = [response.delta for response in responses]
    assert "".join(deltas).strip() == answer
    for end, text in enumerate(texts, 1):
        assert text == "".join(deltas[:end])
    assert [bool(response.additional_kwargs) for response in responses[:-1]] == [False] * (
        len(responses) - 1
    )
    assert _is_reuse(_report(responses[-1]))
    raw = responses[-1].raw
    assert raw["usage"]["completion_tokens"] == 2
    assert 0 < raw["ttft_ms"] <= raw["latency_ms"]


def test_stream_complete(llm: SemKV, prompt: str, answer: str) -> None:
    responses = list(llm.stream_complete(prompt))
    _check_stream(responses, [response.text for response in responses], answer)


def test_stream_chat(llm: SemKV, prompt: str, answer: str) -> None:
    responses = list(llm.stream_chat(_messages(prompt)))
    _check_stream(responses, [r.message.content or "" for r in responses], answer)


async def test_acomplete_and_achat(llm: SemKV, prompt: str, answer: str) -> None:
    completed = await llm.acomplete(prompt)
    chatted = await llm.achat(_messages(prompt))
    assert completed.text == chatted.message.content == llm.complete(prompt).text
    assert completed.text.strip() == answer
    assert _is_reuse(_report(completed))
    assert _is_reuse(_report(chatted))


async def test_astream_complete(llm: SemKV, prompt: str, answer: str) -> None:
    responses = [response async for response in await llm.astream_complete(prompt)]
    _check_stream(responses, [response.text for response in responses], answer)


async def test_astream_chat(llm: SemKV, prompt: str, answer: str) -> None:
    responses = [response async for response in await llm.astream_chat(_messages(prompt))]
    _check_stream(responses, [r.message.content or "" for r in responses], answer)


async def test_many_at_once(llm: SemKV, prompt: str) -> None:
    alone = (await llm.acomplete(prompt)).text
    answers = await asyncio.gather(*(llm.acomplete(prompt) for _ in range(8)))
    assert {response.text for response in answers} == {alone}


def test_a_stream_can_be_left_early(engine: Engine, prompt: str) -> None:
    llm = SemKV(engine=engine, max_tokens=64, sampling={"ignore_eos": True})
    stream = llm.stream_complete(prompt)
    first = next(stream)
    stream.close()
    assert llm.complete(prompt).text.startswith(first.text)


def test_predict_goes_through_chat_and_completion_alike(
    engine: Engine, prompt: str, answer: str
) -> None:
    template = PromptTemplate("{context} who leads Zur stul ? Answer :")
    context = prompt.partition(" who leads")[0]
    for chats in (True, False):
        llm = SemKV(engine=engine, is_chat_model=chats, max_tokens=4)
        assert llm.predict(template, context=context).strip() == answer


def test_reuse_can_be_switched_off(engine: Engine, prompt: str, answer: str) -> None:
    response = SemKV(engine=engine, reuse=False, max_tokens=4).complete(prompt)
    assert response.text.strip() == answer
    report = _report(response)
    assert (report.kv_cache, report.reused_tokens) == ("skip", 0)
    assert report.reason


def test_options_of_a_call_stand_over_the_object_s(llm: SemKV, prompt: str) -> None:
    chosen = _report(llm.complete(prompt, ratio=0.4, selector="chunk_head"))
    assert (chosen.ratio, chosen.selector) == (0.4, "chunk_head")
    assert 0.3 < chosen.recomputed_tokens / chosen.reused_tokens <= 0.45
    assert _report(llm.complete(prompt, reuse=False)).kv_cache == "skip"
    assert _report(llm.complete(prompt, namespace="another")).kv_cache == "miss"


def test_tokens_are_counted_as_the_model_does(engine: Engine, prompt: str) -> None:
    counter = TokenCountingHandler()
    llm = SemKV(engine=engine, max_tokens=4, callback_manager=CallbackManager([counter]))
    response = llm.complete(prompt, formatted=True)
    assert response.raw is not None
    counted = response.raw["usage"]["prompt_tokens"]
    assert llm.count_tokens(prompt) == len(llm.tokens(prompt)) == counted
    assert counter.prompt_llm_token_count == counted
    assert counter.completion_llm_token_count == 2
    list(llm.stream_chat(_messages(prompt)))
    assert counter.prompt_llm_token_count == 2 * counted


def test_sampling_parameters_reach_vllm(engine: Engine, prompt: str, answer: str) -> None:
    endless = SemKV(engine=engine, max_tokens=6, sampling={"ignore_eos": True})
    response = endless.complete(prompt)
    assert response.raw is not None
    assert response.raw["finish_reason"] == "length"
    assert response.raw["usage"]["completion_tokens"] == 6
    stopped = SemKV(engine=engine, max_tokens=6, stop=[answer]).complete(prompt)
    assert answer not in stopped.text


def test_faults_of_a_call_are_option_errors(llm: SemKV, prompt: str) -> None:
    with pytest.raises(OptionError, match="ratio"):
        llm.complete(prompt, ratio=2)
    with pytest.raises(OptionError, match="no_such"):
        llm.complete(prompt, no_such_parameter=1)
    with pytest.raises(OptionError):
        llm.stream_complete(prompt, top_p=7)
    with pytest.raises(OptionError, match="1024"):
        llm.complete("Question " * 2000)
    with pytest.raises(OptionError, match="image"):
        llm.chat([ChatMessage(blocks=[ImageBlock(url="https://example.org/a.png")])])


def test_formatted_prompts_and_own_formatters_bypass_the_template(
    engine: Engine, prompt: str, answer: str
) -> None:
    context, question, rest = prompt.partition("Question :")
    llm = SemKV(
        engine=engine,
        max_tokens=4,
        completion_to_prompt=lambda text: context + text,
        messages_to_prompt=lambda messages: context + str(messages[0].content),
    )
    asked = question + rest
    assert llm.complete(asked).text.strip() == answer
    assert llm.chat([ChatMessage(content=asked)]).message.content == llm.complete(asked).text
    bare = _report(llm.complete(asked, formatted=True))
    assert bare.prompt_tokens < 12


def test_engine_stands_alone(engine: Engine) -> None:
    with pytest.raises(OptionError, match="alone"):
        SemKV(engine=engine, store="elsewhere")


def test_a_given_engine_is_not_closed_with_the_shared_ones(llm: SemKV, prompt: str) -> None:
    close_engines()
    assert llm.complete(prompt).text
