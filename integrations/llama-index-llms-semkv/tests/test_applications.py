"""Query and chat engines, routers, sub-questions and agents answer as over plain vLLM.

With reuse off, and with every reused token recomputed; and at the default ratio the retrieved nodes are
what is reused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM
from llama_index.core.query_engine import (
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import MetadataMode, QueryBundle
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.core.tools.types import ToolMetadata
from llama_index.llms.semkv import SemKV

from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport
from tests.reference.llama_index_llm import PlainLLM

pytestmark = pytest.mark.usefixtures("settings")

QUESTION = "who leads Zur stul ?"
MAX_TOKENS = 6
Reports = Callable[[], list[ReuseReport]]
Ask = Callable[[LLM], Awaitable[str]]


async def same_as_plain(engine: Engine, reports: Reports, chats: bool, ask: Ask) -> str:
    """What `ask` gets from plain vLLM; the same from `SemKV`, twice over."""
    plain = await ask(PlainLLM(engine, MAX_TOKENS, chats))
    assert plain
    options = {"engine": engine, "max_tokens": MAX_TOKENS, "is_chat_model": chats}
    for reuse in (False, True):
        engine.reset_prefix_cache()
        reports()
        given = await ask(SemKV(**options, reuse=reuse, ratio=1.0 if reuse else None))
        seen = reports()
        assert given == plain
        assert seen
        assert {report.kv_cache for report in seen} <= ({"hit", "miss"} if reuse else {"skip"})
        assert any(report.kv_cache == "hit" for report in seen) == reuse
    return plain


def query_engine(index: VectorStoreIndex, llm: LLM, mode: ResponseMode, **options: Any) -> Any:
    return index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=4, **options)


async def query(engine: Any, way: str) -> str:
    if way == "async":
        return str(await engine.aquery(QUESTION))
    response = engine.query(QUESTION)
    return "".join(response.response_gen) if way == "stream" else str(response)


MODES = [
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.SIMPLE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
]
WHOLE_ONLY = (ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE)


@pytest.mark.parametrize("chats", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("way", ["sync", "stream", pytest.param("async", marks=pytest.mark.soak)])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
async def test_every_response_mode(
    engine: Engine,
    index: VectorStoreIndex,
    reports: Reports,
    mode: ResponseMode,
    way: str,
    chats: bool,
) -> None:
    if way == "stream" and mode in WHOLE_ONLY:
        pytest.skip("LlamaIndex does not stream this mode")

    async def ask(llm: LLM) -> str:
        return await query(query_engine(index, llm, mode, streaming=way == "stream"), way)

    await same_as_plain(engine, reports, chats, ask)


async def test_generation_needs_no_nodes(engine: Engine, index: VectorStoreIndex) -> None:
    """The mode that leaves the nodes out: nothing to reuse, the same answer."""

    def ask(llm: LLM) -> str:
        return str(query_engine(index, llm, ResponseMode.GENERATION).query(QUESTION))

    plain = ask(PlainLLM(engine, MAX_TOKENS, True))
    assert ask(SemKV(engine=engine, max_tokens=MAX_TOKENS, ratio=1.0)) == plain


@pytest.mark.parametrize("mode", [ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY])
def test_modes_that_ask_no_model(
    engine: Engine, index: VectorStoreIndex, reports: Reports, mode: ResponseMode
) -> None:
    response = query_engine(index, SemKV(engine=engine), mode).query(QUESTION)
    assert len(response.source_nodes) == 4
    assert reports() == []


@pytest.mark.parametrize("chats", [True, False], ids=["chat", "completion"])
def test_in_compact_the_retrieved_nodes_are_reused(
    engine: Engine, index: VectorStoreIndex, reports: Reports, chats: bool
) -> None:
    llm = SemKV(engine=engine, max_tokens=MAX_TOKENS, is_chat_model=chats)
    engine.reset_prefix_cache()
    response = query_engine(index, llm, ResponseMode.COMPACT).query(QUESTION)
    texts = [hit.node.get_content(MetadataMode.LLM) for hit in response.source_nodes]
    retrieved = sum(map(llm.count_tokens, texts))
    (report,) = reports()
    assert len(texts) == 4
    assert 0.95 * retrieved <= report.exact_tokens + report.reused_tokens <= report.prompt_tokens
    assert report.recomputed_tokens < 0.25 * report.reused_tokens


async def test_a_streamed_answer_is_the_same_asynchronously(
    engine: Engine, index: VectorStoreIndex, reports: Reports
) -> None:
    async def ask(llm: LLM) -> str:
        synthesizer = get_response_synthesizer(llm=llm, streaming=True)
        engine_ = RetrieverQueryEngine(index.as_retriever(similarity_top_k=4), synthesizer)
        response = await engine_.aquery(QUESTION)
        return "".join([token async for token in response.async_response_gen()])

    await same_as_plain(engine, reports, True, ask)


# The reader does not know LlamaIndex's own prompt for it, and says nothing.
CONDENSE = PromptTemplate("{chat_history} Question : {question} Answer :")
CHAT_MODES = ["context", "condense_question", "condense_plus_context", "simple", "best"]
TURNS = (QUESTION, "which mascot does it have ?")


@pytest.mark.parametrize(
    "way",
    [
        "chat",
        "astream_chat",
        *(pytest.param(way, marks=pytest.mark.soak) for way in ("stream_chat", "achat")),
    ],
)
@pytest.mark.parametrize("mode", CHAT_MODES)
async def test_every_chat_engine(
    engine: Engine,
    index: VectorStoreIndex,
    nodes: list[Any],
    reports: Reports,
    mode: str,
    way: str,
) -> None:
    # The simple engine retrieves nothing: the user brings the document.
    first = f"{nodes[-1].text} {QUESTION}" if mode == "simple" else QUESTION

    async def ask(llm: LLM) -> str:
        options: dict[str, Any] = {"streaming": True} if "stream" in way else {}
        if mode == "condense_question":
            options["condense_question_prompt"] = CONDENSE
        chat: Any = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=3, **options)
        said = []
        for turn in (first, TURNS[1]):
            if way == "chat":
                said.append(str(chat.chat(turn)))
            elif way == "achat":
                said.append(str(await chat.achat(turn)))
            elif way == "stream_chat":
                said.append("".join(chat.stream_chat(turn).response_gen))
            else:
                response = await chat.astream_chat(turn)
                said.append("".join([token async for token in response.async_response_gen()]))
        return " | ".join(said)

    await same_as_plain(engine, reports, True, ask)


class TwoQuestions(BaseQuestionGenerator):
    """Two questions for any: what a reader of four million parameters cannot think of itself."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass

    def generate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        asked = (QUESTION, "when was Mok pis launched ?")
        return [SubQuestion(sub_question=text, tool_name=tools[0].name) for text in asked]

    async def agenerate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_sub_questions(
    engine: Engine, index: VectorStoreIndex, reports: Reports, asynchronous: bool
) -> None:
    async def ask(llm: LLM) -> str:
        tool = QueryEngineTool(
            query_engine=query_engine(index, llm, ResponseMode.COMPACT),
            metadata=ToolMetadata(name="schools", description="about schools"),
        )
        whole = SubQuestionQueryEngine.from_defaults(
            [tool],
            question_gen=TwoQuestions(),
            response_synthesizer=get_response_synthesizer(llm=llm),
            use_async=asynchronous,
            verbose=False,
        )
        return str(await whole.aquery("schools ?") if asynchronous else whole.query("schools ?"))

    await same_as_plain(engine, reports, True, ask)


async def test_router(
    engine: Engine, index: VectorStoreIndex, embedding: BaseEmbedding, reports: Reports
) -> None:
    async def ask(llm: LLM) -> str:
        tools = [
            QueryEngineTool.from_defaults(
                query_engine(index, llm, mode), name=name, description=about
            )
            for mode, name, about in (
                (ResponseMode.COMPACT, "leaders", "who leads something"),
                (ResponseMode.TREE_SUMMARIZE, "places", "where something is"),
            )
        ]
        selector = EmbeddingSingleSelector.from_defaults(embedding)
        router = RouterQueryEngine(selector, tools, llm=llm)
        return str(router.query(QUESTION))

    await same_as_plain(engine, reports, True, ask)


@pytest.mark.parametrize("streaming", [False, True])
async def test_react_agent(
    engine: Engine, nodes: list[Any], reports: Reports, streaming: bool
) -> None:
    """The reader cannot think aloud, so its first answer ends the agent's run."""

    def look_up(name: str) -> str:
        """Find what is known of a name."""
        return name

    async def ask(llm: LLM) -> str:
        agent = ReActAgent(tools=[look_up], llm=llm, streaming=streaming)
        return str(await agent.run(f"{nodes[-1].text} Question : {QUESTION} Answer :"))

    await same_as_plain(engine, reports, True, ask)
