"""`create_agent` with a retriever tool: what the tool found is taken out of the store.

    python examples/langchain_agent.py
    python examples/langchain_agent.py --model Qwen/Qwen3-8B --tool-call-parser hermes

What changes from a plain LLM:

    -from langchain_openai import ChatOpenAI
    -llm = ChatOpenAI(model=MODEL)
    +from langchain_semkv import ChatSemKV
    +llm = ChatSemKV(model=MODEL, store=STORE, chat_args=TOOLS)

`TOOLS` names the parser of the model's own tool calls, as `vllm serve` wants it too. The reader
knows no tool calls: `SearchFirst` makes them in its place. Another model goes without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from _langchain import (
    ENGINE_ARGS,
    MODEL,
    QUESTIONS,
    STORE,
    TEMPLATE,
    Reports,
    documents,
    vector_store,
)
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import create_retriever_tool
from langchain_semkv import ChatSemKV, SemKVPrecompute


class SearchFirst(AgentMiddleware[Any, Any]):
    """Calls the tool with the question, then asks the model in the one form that the reader knows."""

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | AIMessage:
        question, *_, last = [request.messages[0], *request.messages]
        if last is question:
            call = {"name": "search", "args": {"query": question.text}, "id": "1"}
            return AIMessage("", tool_calls=[call])
        prompt = TEMPLATE.format(context=last.text, input=question.text)
        return handler(request.override(messages=[HumanMessage(prompt)], tools=[]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="An agent with a retriever tool.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tool-call-parser", help="of the model, by its name in vLLM")
    options = parser.parse_args(arguments)
    tools: dict[str, Any] = {}
    if options.tool_call_parser:
        tools = {"enable_auto_tool_choice": True, "tool_call_parser": options.tool_call_parser}
    is_reader = options.model == MODEL

    llm = ChatSemKV(
        model=options.model,
        store=STORE,
        engine_args=ENGINE_ARGS if is_reader else {},
        chat_args=tools,
        max_tokens=4 if is_reader else 512,
    )
    vectors = vector_store()
    vectors.add_documents(list(SemKVPrecompute(llm).transform_documents(documents())))
    search = create_retriever_tool(
        vectors.as_retriever(search_kwargs={"k": 3}),
        "search",
        "Finds documents about organisations.",
        response_format="content_and_artifact",
        document_separator="\n",
    )
    middleware = [SearchFirst()] if is_reader else []
    agent: Any = create_agent(llm, [search], middleware=middleware)
    for question in QUESTIONS:
        asked = {"messages": [HumanMessage(question)]}
        *_, said, answer = agent.invoke(asked, config={"callbacks": [Reports()]})["messages"]
        print(question, answer.text, [found.metadata["source"] for found in said.artifact])


if __name__ == "__main__":
    main()
