"""`SemKV` with `base_url` of a `semkv serve`: the same answers as in this process."""

from __future__ import annotations

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.llms.semkv import KVPrecompute, SemKV

from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.report import ReuseReport
from workbench.server import Server


@pytest.fixture
def llm(server: Server) -> SemKV:
    return SemKV(base_url=server.base_url, api_key=server.api_key, max_tokens=4)


def test_metadata_is_the_server_s(llm: SemKV, server: Server) -> None:
    assert llm.metadata.context_window == 1024
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == server.model


def test_it_answers_as_in_this_process(
    llm: SemKV, engine: Engine, prompt: str, answer: str
) -> None:
    local = SemKV(engine=engine, max_tokens=4).complete(prompt)
    remote = llm.complete(prompt)
    assert remote.text == local.text
    assert remote.text.strip() == answer
    here = ReuseReport.from_mapping(local.additional_kwargs["semkv"])
    there = ReuseReport.from_mapping(remote.additional_kwargs["semkv"])
    assert there.kv_cache == "hit"
    assert there.chunk_ids == here.chunk_ids
    assert there.prompt_tokens == here.prompt_tokens
    assert remote.raw is not None
    assert remote.raw["usage"]["prompt_tokens"] == there.prompt_tokens


async def test_the_eight_methods_agree(llm: SemKV, prompt: str) -> None:
    messages = [ChatMessage(content=prompt)]
    text = llm.complete(prompt).text
    assert (llm.chat(messages).message.content or "").strip() == text.strip()
    assert (await llm.acomplete(prompt)).text == text
    assert ((await llm.achat(messages)).message.content or "").strip() == text.strip()
    streams = [
        list(llm.stream_complete(prompt)),
        list(llm.stream_chat(messages)),
        [part async for part in await llm.astream_complete(prompt)],
        [part async for part in await llm.astream_chat(messages)],
    ]
    for parts in streams:
        assert "".join(part.delta or "" for part in parts).strip() == text.strip()
        assert parts[-1].raw["usage"]["completion_tokens"] == 2
        report = ReuseReport.from_mapping(parts[-1].additional_kwargs["semkv"])
        assert report.kv_cache == "hit"


def test_options_reach_the_server(llm: SemKV, server: Server, prompt: str) -> None:
    report = llm.complete(prompt, ratio=0.4, selector="chunk_head").additional_kwargs["semkv"]
    assert (report["ratio"], report["selector"]) == (0.4, "chunk_head")
    off = SemKV(
        base_url=server.base_url, api_key=server.api_key, reuse=False, max_tokens=4
    ).complete(prompt)
    assert off.additional_kwargs["semkv"]["kv_cache"] == "skip"
    endless = llm.complete(prompt, max_tokens=6, ignore_eos=True)
    assert endless.raw is not None
    assert endless.raw["usage"]["completion_tokens"] == 6


def test_what_the_server_refuses_is_an_option_error(
    llm: SemKV, server: Server, prompt: str
) -> None:
    with pytest.raises(OptionError, match="namespace"):
        llm.complete(prompt, namespace="another")
    with pytest.raises(OptionError):
        llm.stream_complete("Question " * 2000)
    with pytest.raises(OptionError, match=f"it has {server.model}"):
        _ = SemKV(base_url=server.base_url, api_key=server.api_key, model="unknown").metadata


def test_documents_are_stored_through_the_server(server: Server) -> None:
    """In the namespace of the key, for which nobody else's chunks are there."""
    tenant = SemKV(base_url=server.base_url, api_key=server.tenant_key, max_tokens=4)
    # Unlike the corpus: of a run of words that is in it, the default namespace may have the KV.
    text = "mascot Beacon Umbra Dijon otter swan Liam Ivan owl funded members flag launched Metz"

    def reused(model: SemKV) -> int:
        report = model.complete(f"Nobody knows . {text} Answer :").additional_kwargs["semkv"]
        return int(report["exact_tokens"] + report["reused_tokens"])

    step = KVPrecompute(llm=tenant)
    before = step.to_dict()
    assert reused(tenant) == 0
    step([TextNode(text=text, id_="ours")])
    assert reused(tenant) == tenant.count_tokens(text)
    assert reused(SemKV(base_url=server.base_url, api_key=server.api_key, max_tokens=4)) == 0
    after = step.to_dict()
    # An `IngestionCache` tells models, stores, namespaces and what went on since apart.
    assert before["model"] == after["model"]
    assert before["store"] != after["store"]
    assert step.forget(["ours"]) == 1
    assert reused(tenant) == 0


@pytest.mark.slow
def test_no_server_is_an_engine_error(prompt: str) -> None:
    llm = SemKV(base_url="http://127.0.0.1:9/v1", timeout=1)
    with pytest.raises(EngineError, match="does not answer"):
        llm.complete(prompt)
