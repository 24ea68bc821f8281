"""Both classes with `base_url` of a `semkv serve`: the same answers as in this process."""

from __future__ import annotations

from typing import Any

import pytest
from asking import as_documents, report
from langchain_core.documents import Document
from langchain_semkv import ChatSemKV, SemKVIndex, SemKVLLM, SemKVPrecompute

from semkv_rag.engine import Engine
from semkv_rag.errors import OptionError
from workbench.server import Server


@pytest.fixture
def reach(server: Server) -> dict[str, Any]:
    return {"base_url": server.base_url, "api_key": server.api_key, "max_tokens": 4}


@pytest.fixture(scope="module")
def prompt(documents: list[str], question: str) -> str:
    context = "\n".join(document.page_content for document in as_documents(documents))
    return f"{context} Question : {question} Answer :"


async def test_it_answers_as_in_this_process(
    reach: dict[str, Any], engine: Engine, server: Server, prompt: str, answer: str
) -> None:
    chat, llm = ChatSemKV(**reach), SemKVLLM(**reach)
    here = ChatSemKV(engine=engine, max_tokens=4).invoke(prompt)
    there = chat.invoke(prompt)
    assert there.text == here.text
    assert there.text.strip() == answer
    assert report(there).chunk_ids == report(here).chunk_ids
    assert there.response_metadata["model_name"] == server.model
    assert (there.usage_metadata or {})["input_tokens"] == report(there).prompt_tokens
    assert llm.invoke(prompt).strip() == answer
    assert (await chat.ainvoke(prompt)).text == here.text
    assert (await llm.ainvoke(prompt)).strip() == answer
    chunks = list(chat.stream(prompt))
    assert "".join(chunk.text for chunk in chunks) == here.text
    assert chunks[-1].chunk_position == "last"
    assert report(chunks[-1]).kv_cache == "hit"
    assert "".join([text async for text in llm.astream(prompt)]).strip() == answer
    assert len(set(llm.batch([prompt] * 4) + await llm.abatch([prompt] * 4))) == 1


def test_tokens_are_counted_by_the_server(reach: dict[str, Any], engine: Engine) -> None:
    text = "The Mok pis school"
    counted = len(engine.tokenizer.encode(text, add_special_tokens=False))
    assert ChatSemKV(**reach).get_num_tokens(text) == counted
    with pytest.raises(OptionError, match="get_num_tokens"):
        ChatSemKV(**reach).get_token_ids(text)


def test_what_the_server_refuses_is_an_option_error(
    reach: dict[str, Any], server: Server, prompt: str
) -> None:
    with pytest.raises(OptionError, match="namespace"):
        ChatSemKV(**reach).invoke(prompt, namespace="another")
    with pytest.raises(OptionError):
        list(SemKVLLM(**reach).stream("Question " * 2000))
    with pytest.raises(OptionError, match=f"it has {server.model}"):
        ChatSemKV(**reach).invoke(prompt, model="unknown")


def test_documents_are_stored_at_the_server(reach: dict[str, Any], server: Server) -> None:
    llm = ChatSemKV(**{**reach, "api_key": server.tenant_key})
    text = "The Tre klim school keeps a swan as mascot . It was launched in 1988 ."
    assert report(llm.invoke(text)).kv_cache == "miss"
    document = Document(text, metadata={"source": "tre-klim"})
    assert list(SemKVPrecompute(llm).transform_documents([document])) == [document]
    assert report(llm.invoke(text)).kv_cache == "hit"
    index = SemKVIndex(llm=llm)
    other = Document("It gets its money from Beacon . It is led by Liam .", id="1")
    assert index.upsert([other]) == {"succeeded": ["1"], "failed": []}
    assert report(llm.invoke(other.page_content)).kv_cache == "hit"
    assert index.delete(["1"])["num_deleted"] == 1
    assert report(llm.invoke(other.page_content)).reused_tokens == 0
