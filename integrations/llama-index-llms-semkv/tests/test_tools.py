"""Tools, function agents, images and structured prediction through vLLM's own layer.

A random model calls no tool of itself, so the calls are forced; what is forced is then real: vLLM's
grammar, its parsers, LlamaIndex's agent.
"""

# No `from __future__ import annotations`: LlamaIndex reads a tool's arguments out of its annotations.
import base64
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ThinkingBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.semkv import SemKV, precompute_index
from llama_index.llms.semkv.messages import to_openai

from semkv_rag.engine import Engine
from semkv_rag.errors import OptionError
from semkv_rag.report import ReuseReport

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Place(StrEnum):
    HARBOUR = "harbour"
    RIVER = "river"


class Answer(BaseModel):
    """Where a thing is."""

    place: Place
    sure: bool


def find(place: Place, deep: bool) -> str:
    """Find what is at a place."""
    return f"at the {place}, {deep}: a boat"


@pytest.fixture
def sampling(tools: Engine) -> dict[str, Any]:
    """Without blanks, which JSON may have any number of, and a random model does."""
    words = {number: tools.tokenizer.decode([number]) for number in range(2, 512)}
    blanks = [str(number) for number, word in words.items() if not word.strip()]
    return {"logit_bias": dict.fromkeys(blanks, -100.0)}


@pytest.fixture
def llm(tools: Engine, sampling: dict[str, Any]) -> SemKV:
    return SemKV(engine=tools, max_tokens=200, sampling=sampling)


TOOL = FunctionTool.from_defaults(find)


def test_the_model_calls_functions(llm: SemKV, engine: Engine) -> None:
    assert llm.metadata.is_function_calling_model
    # The session's engine was started without a tool parser.
    assert not SemKV(engine=engine).metadata.is_function_calling_model
    # The caller's own way to write messages has no place for tools.
    own = SemKV(engine=llm._engine, messages_to_prompt=lambda messages: "text")
    assert not own.metadata.is_function_calling_model


def check_call(call: Any) -> None:
    assert call.tool_name == "find"
    assert call.tool_kwargs["place"] in ("harbour", "river")
    assert type(call.tool_kwargs["deep"]) is bool
    assert call.tool_id


async def test_required_calls_in_all_four_ways(llm: SemKV) -> None:
    asked: dict[str, Any] = {"user_msg": "where?", "tool_required": True}
    whole = llm.chat_with_tools([TOOL], **asked)
    (call,) = llm.get_tool_calls_from_response(whole)
    check_call(call)
    assert whole.message.content is None
    assert json.loads(whole.message.additional_kwargs["tool_calls"][0]["function"]["arguments"])
    assert ReuseReport.from_mapping(whole.additional_kwargs["semkv"]).prompt_tokens > 0
    (later,) = llm.get_tool_calls_from_response(await llm.achat_with_tools([TOOL], **asked))
    assert later.tool_kwargs == call.tool_kwargs

    streamed = list(llm.stream_chat_with_tools([TOOL], **asked))
    streamed_later = [p async for p in await llm.astream_chat_with_tools([TOOL], **asked)]
    for responses in (streamed, streamed_later):
        assert len(responses) > 2
        sizes = [len(str(r.message.additional_kwargs)) for r in responses]
        assert sizes == sorted(sizes)
        (joined,) = llm.get_tool_calls_from_response(responses[-1])
        assert joined.tool_kwargs == call.tool_kwargs
        for response in responses:  # half a call is no error
            llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)


def test_a_tool_is_chosen_by_name(llm: SemKV) -> None:
    other = FunctionTool.from_defaults(find, name="other")
    response = llm.chat_with_tools([other, TOOL], user_msg="where?", tool_choice="find")
    (call,) = llm.get_tool_calls_from_response(response)
    check_call(call)
    output = llm.predict_and_call([TOOL], user_msg="where?", tool_required=True)
    assert "a boat" in str(output)


def test_no_call_is_an_error_only_if_asked_for(llm: SemKV) -> None:
    response = llm.chat_with_tools([TOOL], user_msg="where?", tool_choice="none", max_tokens=4)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        llm.get_tool_calls_from_response(response)


def test_tools_without_a_parser_say_what_is_missing(engine: Engine) -> None:
    with pytest.raises(OptionError, match="tool_call_parser"):
        SemKV(engine=engine).chat_with_tools([TOOL], user_msg="where?")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_function_agent_with_a_retriever_tool(
    llm: SemKV, embedding: BaseEmbedding, streaming: bool
) -> None:
    """The call is forced, the documents come back, and the second answer reuses their KV."""
    documents = [
        TextNode(text="the boat stands in the harbour where the river does end " * 3),
        TextNode(text="who owns the car is found in the store layer by layer " * 3),
    ]
    index = VectorStoreIndex(documents, embed_model=embedding)
    precompute_index(index, llm)

    def search(place: Place) -> str:
        """Search the documents."""
        found = index.as_retriever(similarity_top_k=2).retrieve(place)
        return "\n\n".join(hit.node.get_content() for hit in found)

    agent = FunctionAgent(
        tools=[search], llm=llm, initial_tool_choice="search", streaming=streaming
    )
    assert llm._engine is not None
    llm._engine.reset_prefix_cache()
    handler = agent.run("where does the boat stand?", max_iterations=3)
    results, raws, streamed = [], [], ""
    async for event in handler.stream_events():
        if isinstance(event, ToolCallResult):
            results.append(event)
        if isinstance(event, AgentStream):
            streamed += event.delta
            raws.append(event.raw)
    answer = await handler
    assert [result.tool_name for result in results] == ["search"]
    assert "harbour" in str(results[0].tool_output)
    assert answer.response.content
    assert not streaming or streamed.strip() == answer.response.content.strip()
    # The same conversation once more, to see its report.
    conversation = [
        ChatMessage("where does the boat stand?"),
        ChatMessage(
            role="assistant",
            blocks=[
                ToolCallBlock(
                    tool_call_id=results[0].tool_id,
                    tool_name="search",
                    tool_kwargs=results[0].tool_kwargs,
                )
            ],
        ),
        ChatMessage(
            role="tool",
            content=str(results[0].tool_output.content),
            additional_kwargs={"tool_call_id": results[0].tool_id},
        ),
    ]
    llm._engine.reset_prefix_cache()
    last = llm.chat_with_tools([TOOL], chat_history=conversation, max_tokens=4)
    report = ReuseReport.from_mapping(last.additional_kwargs["semkv"])
    retrieved = sum(llm.count_tokens(node.text) for node in documents)
    assert report.exact_tokens + report.reused_tokens >= 0.95 * retrieved


PROMPT = PromptTemplate("Where is {thing}?")


@pytest.mark.parametrize("chats", [True, False])
async def test_structured_prediction(tools: Engine, chats: bool) -> None:
    llm = SemKV(engine=tools, max_tokens=60, is_chat_model=chats)
    made = llm.structured_predict(Answer, PROMPT, thing="the car")
    assert isinstance(made, Answer)
    assert await llm.astructured_predict(Answer, PROMPT, thing="the car") == made
    partials: list[Any] = list(llm.stream_structured_predict(Answer, PROMPT, thing="the car"))
    assert partials[-1] == made
    stream = await llm.astream_structured_predict(Answer, PROMPT, thing="the car")
    assert [partial async for partial in stream][-1] == made
    structured = llm.as_structured_llm(Answer).complete("Where is the car?")
    assert isinstance(structured.raw, Answer)


def test_too_few_tokens_for_an_object(llm: SemKV) -> None:
    with pytest.raises(OptionError, match="max_tokens"):
        llm.structured_predict(Answer, PROMPT, {"max_tokens": 3}, thing="the car")


def test_another_program_mode_is_llamaindex_s_own(tools: Engine, sampling: dict[str, Any]) -> None:
    llm = SemKV(engine=tools, max_tokens=200, sampling=sampling, pydantic_program_mode="function")
    made = llm.structured_predict(Answer, PROMPT, thing="the car")
    assert isinstance(made, Answer)


def test_log_probabilities(llm: SemKV) -> None:
    chatted = llm.chat([ChatMessage("where")], max_tokens=3, logprobs=True, top_logprobs=2)
    completed = llm.complete("where", formatted=True, max_tokens=3, logprobs=2)
    for logprobs in (chatted.logprobs, completed.logprobs):
        assert logprobs is not None
        assert [len(token) for token in logprobs] == [2, 2, 2]
        assert all(entry.logprob <= 0 for token in logprobs for entry in token)


def test_messages_with_images_are_openai_s(tmp_path: Path) -> None:
    file = tmp_path / "pixel.png"
    file.write_bytes(PIXEL)
    message = ChatMessage(
        role="user",
        blocks=[
            TextBlock(text="what is it?"),
            ImageBlock(url="https://example.org/a.png", detail="low"),
            ImageBlock(path=file),
            ImageBlock(image=PIXEL),
        ],
    )
    inline = {"url": f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"}
    assert to_openai(message, images=True) == {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is it?"},
            {
                "type": "image_url",
                "image_url": {"url": "https://example.org/a.png", "detail": "low"},
            },
            {"type": "image_url", "image_url": inline},
            {"type": "image_url", "image_url": inline},
        ],
    }
    with pytest.raises(OptionError, match="takes no images"):
        to_openai(message, images=False)


def test_what_a_model_thought_is_not_told_it_again() -> None:
    message = ChatMessage(
        role="assistant", blocks=[ThinkingBlock(content="hm"), TextBlock(text="yes")]
    )
    assert to_openai(message, images=False) == {"role": "assistant", "content": "yes"}
