"""Agents with a retriever tool, on a model that calls tools by itself."""

from __future__ import annotations

from typing import Any

import pytest
from asking import report, reused
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from langchain_semkv import ChatSemKV, SemKVPrecompute
from lessons import LEADER, LEADER_ANSWER, found

from semkv_rag.engine import Engine


class Search(BaseRetriever):
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        assert query == "Mok pis"
        return [Document(text, metadata={"source": str(n)}) for n, text in enumerate(found())]


@pytest.fixture(scope="module")
def stored(taught: dict[str, Any]) -> dict[str, Any]:
    """The taught model's options, with the agent's documents in its store."""
    step = SemKVPrecompute(ChatSemKV(**taught))
    documents = [Document(text) for text in found()]
    assert list(step.transform_documents(documents)) == documents
    assert step.result is not None
    assert step.result.chunks_captured == 2 * len(documents), "behind the prefix, and a neighbour"
    return taught


def _ask(options: dict[str, Any], response_format: Any) -> list[Any]:
    tool = create_retriever_tool(
        Search(), "search", "Finds documents.", response_format=response_format
    )
    agent: Any = create_agent(ChatSemKV(**options), [tool])
    messages: list[Any] = agent.invoke({"messages": [HumanMessage(LEADER)]})["messages"]
    return messages


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
@pytest.mark.parametrize("more", [{"reuse": False}, {"ratio": 1.0}])
def test_an_agent_answers_from_what_its_tool_found(
    stored: dict[str, Any], response_format: str, more: dict[str, Any]
) -> None:
    engine: Engine = ChatSemKV(**stored).backend()._engine  # type: ignore[attr-defined]
    engine.reset_prefix_cache()
    _, calling, said, answer = _ask({**stored, **more}, response_format)
    assert calling.tool_calls[0]["name"] == "search"
    assert isinstance(said, ToolMessage)
    assert bool(said.artifact) == (response_format == "content_and_artifact")
    assert isinstance(answer, AIMessage)
    assert answer.text == LEADER_ANSWER
    if "ratio" in more:
        tokens = sum(len(engine.tokenizer.encode(text)) for text in found())
        assert reused(report(answer)) >= 0.95 * tokens
        assert report(answer).kv_cache == "hit"


async def test_an_agent_streams(stored: dict[str, Any]) -> None:
    tool = create_retriever_tool(Search(), "search", "Finds documents.")
    agent: Any = create_agent(ChatSemKV(**stored, ratio=1.0), [tool])
    texts = []
    asked = {"messages": [HumanMessage(LEADER)]}
    async for chunk, _ in agent.astream(asked, stream_mode="messages"):
        if isinstance(chunk, AIMessage) and chunk.text:
            texts.append(chunk.text)
    assert "".join(texts) == LEADER_ANSWER
    assert len(texts) > 2
