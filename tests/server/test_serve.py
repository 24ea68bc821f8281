"""Any OpenAI client against `semkv serve`: reuse with no change on its side."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from typing import Any

import httpx
import openai
import pytest

from semkv_rag.engine import Completion, Engine
from semkv_rag.report import Explored, ReuseReport
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkKey, KVStore, VectorKey, chunk_id
from workbench.answers import plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.server import Server

QUESTION = random_tokens(501, 10)
FREE: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "extra_body": {"ignore_eos": True}}


def put(engine: Engine, server: Server, chunks: list[Tokens], namespace: str) -> list[Stored]:
    """Store chunks in the running server's store, as another process does."""
    stored = store_chunks(engine, chunks, namespace=namespace)
    assert engine.store is not None
    with KVStore(server.store) as store:
        for chunk in stored:
            source = engine.store.path(engine.fingerprint, namespace, chunk.id)
            target = store.path(engine.fingerprint, namespace, chunk.id)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        store.add_model(engine.fingerprint, {"name": engine.model})
        keys = [ChunkKey(chunk.id, engine.fingerprint, namespace) for chunk in stored]
        assert len(store.add(keys)) == len(keys)
    return stored


def client_of(server: Server, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=key or server.api_key, max_retries=0)


def report_of(response: Any) -> ReuseReport:
    return ReuseReport.from_mapping(response.model_extra["kv_transfer_params"]["semkv"])


def text_of(completion: Completion, engine: Engine) -> str:
    return str(engine.tokenizer.decode(completion.token_ids))


def test_an_unmodified_client_gets_reuse_and_the_same_answer(
    engine: Engine, server: Server
) -> None:
    stored = put(engine, server, [random_tokens(s, 90) for s in (11, 12)], "default")
    prompt = stored[0].tokens + QUESTION
    response = client_of(server).completions.create(model=server.model, prompt=prompt, **FREE)
    report = report_of(response)
    assert report.kv_cache == "hit"
    assert report.exact_tokens == 90
    assert report.chunk_ids == (stored[0].id,)
    expected = plain(engine, prompt, logprobs=None)
    assert response.choices[0].text.split() == text_of(expected, engine).split()


def test_options_of_a_request(engine: Engine, server: Server) -> None:
    stored = put(engine, server, [random_tokens(s, 90) for s in (13, 14)], "default")
    prompt = stored[1].tokens + stored[0].tokens + QUESTION

    def ask(**options: Any) -> ReuseReport:
        body = {"ignore_eos": True, "kv_transfer_params": {"semkv": options}}
        response = client_of(server).completions.create(
            model=server.model, prompt=prompt, temperature=0, max_tokens=2, extra_body=body
        )
        return report_of(response)

    assert ask(ratio=0.5, selector="chunk_head").recomputed_tokens == 45
    assert ask(selector="none").recomputed_tokens == 0
    assert ask(enabled=False).kv_cache == "skip"
    for wrong, words in (
        ({"ratio": 2}, "from 0 to 1"),
        ({"selector": "best"}, "kv_deviation"),
        ({"namespace": "tenant"}, "comes from the server"),
        ({"capture": {}}, "unknown option"),
        ({"speed": 1}, "unknown option"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(**wrong)


def test_the_namespace_follows_the_api_key(engine: Engine, server: Server) -> None:
    mine = put(engine, server, [random_tokens(15, 90)], "tenant")[0]
    prompt = random_tokens(502, 5) + mine.tokens + QUESTION
    ask: dict[str, Any] = {"model": server.model, "prompt": prompt, **FREE}
    tenant = report_of(client_of(server, server.tenant_key).completions.create(**ask))
    other = report_of(client_of(server).completions.create(**ask))
    assert tenant.chunk_ids == (mine.id,)
    assert other.kv_cache == "miss"
    assert other.chunk_ids == ()
    assert other.cached_tokens == 0
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "no key").completions.create(**ask)


def test_no_other_way_to_a_namespace(engine: Engine, server: Server) -> None:
    mine = put(engine, server, [random_tokens(16, 90)], "tenant")[0]
    prompt = mine.tokens + QUESTION
    wishes = {"kv_transfer_params": {"semkv": {"namespace": "tenant"}}}
    for body in ({"vllm_xargs": wishes}, wishes):
        with pytest.raises(openai.BadRequestError):
            client_of(server).completions.create(
                model=server.model, prompt=prompt, max_tokens=1, extra_body=body
            )
    url = server.base_url.removesuffix("/v1") + "/tokenize"
    with pytest.raises(openai.BadRequestError):
        client_of(server).post(url, body={"prompt": "x", **wishes}, cast_to=dict[str, Any])


def test_a_stream_s_last_chunk_has_the_report(engine: Engine, server: Server) -> None:
    stored = put(engine, server, [random_tokens(17, 90)], "default")[0]
    ask: dict[str, Any] = {
        "model": server.model,
        "prompt": random_tokens(503, 3) + stored.tokens + QUESTION,
        **FREE,
    }
    whole = client_of(server).completions.create(**ask)
    chunks = list(client_of(server).completions.create(stream=True, **ask))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason
    assert report_of(chunks[-1]).chunk_ids == (stored.id,)
    assert sum("kv_transfer_params" in (chunk.model_extra or {}) for chunk in chunks) == 1


def test_a_stream_of_several_answers_has_the_report_where_answers_end(server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "prompt": QUESTION, **FREE}
    ask |= {"n": 3, "temperature": 1, "seed": 1}  # a greedy request has one answer
    ask["stream_options"] = {"include_usage": True}
    chunks = list(client_of(server).completions.create(stream=True, **ask))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}
    assert chunks.pop().usage is not None
    told = ["kv_transfer_params" in (chunk.model_extra or {}) for chunk in chunks]
    ends = [chunk.choices[0].finish_reason is not None for chunk in chunks]
    assert told[-1] and not any(had and not end for had, end in zip(told, ends, strict=True))


def test_a_streamed_chat_has_a_choice_in_every_chunk(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Question : who leads Tre klim ? Answer :"}]
    ask: dict[str, Any] = {"model": server.model, "messages": messages, "max_tokens": 4}
    chunks = list(client_of(server).chat.completions.create(stream=True, **ask))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert report_of(chunks[-1]).reason == "no stored chunk was found in the prompt"


def test_chat(server: Server) -> None:
    response = client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Question : who leads Tre klim ? Answer :"}],
        max_tokens=2,
        temperature=0,
    )
    assert response.choices[0].message.content
    assert report_of(response).reason == "no stored chunk was found in the prompt"


def test_the_other_apis_answer_too(server: Server) -> None:
    client = client_of(server)
    text = "Question : who leads Tre klim ? Answer :"
    said = client.responses.create(
        model=server.model, input=text, max_output_tokens=4, temperature=0
    )
    assert said.output_text
    body = {
        "model": server.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": text}],
    }
    message = client.post("/messages", body=body, cast_to=dict[str, Any])
    assert message["content"][0]["text"]


def test_a_tool_that_is_named_or_none_needs_no_parser(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    ask: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Question : who leads Tre klim ? Answer :"}],
        "tools": [tool],
        "max_tokens": 4,
        "temperature": 0,
    }
    said = client_of(server).chat.completions.create(**ask, tool_choice="none")
    assert said.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client_of(server).chat.completions.create(**ask)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("precompute", {}),
        ("precompute", {"documents": [{"name": "a"}]}),
        ("precompute", {"documents": [{"name": "a", "chunks": [1]}]}),
        ("precompute", {"documents": [], "surprise": 1}),
        ("precompute", {"documents": [], "prefix": 3}),
        ("forget", {"sources": "a"}),
        ("forget", []),
    ],
    ids=str,
)
def test_what_the_server_s_own_routes_do_not_take(server: Server, route: str, body: Any) -> None:
    url = server.base_url.removesuffix("/v1") + f"/semkv/v1/{route}"
    with pytest.raises(openai.BadRequestError):
        client_of(server).post(url, body=body, cast_to=dict[str, Any])
    with pytest.raises(openai.PermissionDeniedError, match="operator"):
        client_of(server).post(url + "/more", body=body, cast_to=dict[str, Any])


def test_a_client_that_leaves_stops_its_run(server: Server) -> None:
    url = server.base_url.removesuffix("/v1") + "/semkv/v1"
    text = " ".join(["The harbour of Ver lok has a crane and a lamp ."] * 8)
    documents = [{"name": f"left/{n}", "chunks": [f"{n} {text}"]} for n in range(400)]
    headers = {"Authorization": f"Bearer {server.tenant_key}"}
    with httpx.Client(headers=headers, timeout=60) as client:
        with client.stream("POST", f"{url}/precompute", json={"documents": documents}) as events:
            for line in events.iter_lines():
                if '"phase": "computing"' in line and '"documents": 0' not in line:
                    break
        names = [document["name"] for document in documents]
        removed, more = 0, 1
        while more or not removed:  # what was under way still comes, and then no more
            time.sleep(2)
            more = client.post(f"{url}/forget", json={"sources": names}).json()["removed"]
            removed += more
        assert removed < 400


def until_stored(engine: Engine, server: Server, prompt: list[int]) -> str:
    """Wait for the prompt in the server's store; its id there."""
    id_ = chunk_id(engine.fingerprint, "default", token_array([]), token_array(prompt))
    until = time.monotonic() + 60
    with KVStore(server.store, read_only=True) as store:
        while not store.prompts.get(engine.fingerprint, "default", [id_]):
            assert time.monotonic() < until
            time.sleep(0.1)
    return id_


def test_a_prompt_that_was_asked_before(engine: Engine, server: Server) -> None:
    prompt = random_tokens(701, server.captures_beyond + 20)
    before = len(server.log())

    def ask(key: str) -> ReuseReport:
        client = client_of(server, key)
        answer = client.completions.create(model=server.model, prompt=prompt, **FREE)
        expected = plain(engine, prompt, logprobs=None)
        assert answer.choices[0].text.split() == text_of(expected, engine).split()
        return report_of(answer)

    first = ask(server.api_key)
    assert (first.served_by, first.tiers["exact_text"]) == (None, "miss")
    until_stored(engine, server, prompt)
    again = ask(server.api_key)
    assert (again.served_by, again.exact_tokens) == ("exact_text", len(prompt) - 1)
    assert ask(server.tenant_key).served_by is None, "another tenant's"
    log = server.log()[before:].splitlines()
    lines = [line for line in log if "hit (text:exact) | latency=" in line]
    assert len(lines) == 1
    assert "exact_text=hit, semantic_text=skip, kv_cache=hit" in lines[0]


def test_outcomes_are_told_of_ones_own_prompts(engine: Engine, server: Server) -> None:
    prompt = random_tokens(702, server.captures_beyond + 20)
    client_of(server).completions.create(model=server.model, prompt=prompt, **FREE)
    id_ = until_stored(engine, server, prompt)
    with KVStore(server.store) as store:
        explored = asdict(Explored("default", id_, "semantic", "an encoder", 0.9))

        def tell(key: str, **fields: Any) -> httpx.Response:
            return httpx.post(
                server.base_url.removesuffix("/v1") + "/semkv/v1/outcome",
                json={"explored": explored, "correct": True, **fields},
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            )

        assert tell(server.tenant_key).json() == {"noted": False}, "another tenant's prompt"
        assert tell(server.api_key).json() == {"noted": True}
        key = VectorKey("semantic", "an encoder")
        outcomes = store.prompts.outcomes(engine.fingerprint, "default", id_, key)
        assert [(outcome.similarity, outcome.correct) for outcome in outcomes] == [(0.9, True)]
    for wrong in ({"correct": 1}, {"explored": {"donor": id_}}, {"explored": None}):
        assert tell(server.api_key, **wrong).status_code == 400
    assert tell("nobody's key").status_code == 401
