"""What the classes say of their options before any engine is started."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_semkv import ChatSemKV, SemKVIndex, SemKVLLM
from langchain_semkv.messages import to_openai
from pydantic import BaseModel, SecretStr

from semkv_rag.errors import EngineError, OptionError
from semkv_rag.prompt_cache import PerceptualHash, PromptCacheOptions

CLASSES = [ChatSemKV, SemKVLLM]


class Joke(BaseModel):
    setup: str


def test_they_are_langchain_s_models() -> None:
    assert isinstance(ChatSemKV(model="anything"), BaseChatModel)
    assert isinstance(SemKVLLM(model="anything"), BaseLLM)


@pytest.mark.parametrize("model", CLASSES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give a model"),
        ({"model": "m", "ratio": 1.5}, "ratio is 1.5"),
        ({"model": "m", "selector": "best"}, "kv_deviation"),
        ({"model": "m", "check_layer": 0}, "check_layer"),
        ({"model": "m", "preset": "best"}, "preset is 'best': use one of fast, balanced, exact"),
        ({"model": "m", "question_tokens": 0}, "question_tokens is 0"),
        ({"model": "m", "namespace": ""}, "namespace"),
        ({"model": "m", "max_tokens": 0, "temperature": -1}, r"max_tokens.*temperature"),
        ({"model": "m", "timeout": 0}, "timeout"),
        ({"model": "m", "engine_args": "bf16"}, "engine_args"),
        ({"model": "m", "no_such_option": 1}, "no_such_option"),
        ({"model": "m", "store": "s", "prompt_cache": {"threshold": 2}}, "threshold is 2"),
        ({"model": "m", "store": "s", "prompt_cache": {"treshold": 1}}, "unknown .*treshold"),
        ({"model": "m", "store": "s", "prompt_cache": 3}, "prompt_cache"),
        ({"model": "m", "prompt_cache": {}}, "prompt_cache needs a store"),
        ({"model": "m", "store": "s", "encoders": {"semantic": "minilm"}}, "give prompt_cache too"),
        (
            {"model": "m", "store": "s", "prompt_cache": {}, "encoders": {"semantic": 3}},
            "no encoder",
        ),
        (
            {"base_url": "http://localhost/v1", "prompt_cache": {}},
            "the server's: it decides, .* --prompt-cache",
        ),
        ({"model": "m", "store": "s", "ram_bytes": -1}, "ram_bytes"),
        ({"model": "m", "ram_bytes": 5}, "ram_bytes needs a store"),
        (
            {"base_url": "http://localhost/v1", "lora": "a"},
            "the name that it serves the adapter by",
        ),
        ({"base_url": "http://localhost/v1", "ram_bytes": 5}, "ram_bytes are the server's"),
        ({"base_url": "http://localhost/v1", "store": "s"}, "store are the server's"),
        ({"base_url": "http://localhost/v1", "chat_args": {"a": 1}}, "chat_args are the server's"),
    ],
)
def test_an_impossible_option_is_refused_at_once(
    model: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        model(**options)


@pytest.mark.parametrize("model", CLASSES)
def test_the_key_is_secret(model: type, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model(base_url="http://localhost/v1", api_key="hush")
    assert isinstance(llm.api_key, SecretStr)
    assert "hush" not in repr(llm) + str(llm) + dumps(llm) + str(llm._get_ls_params())
    assert dumpd(llm)["kwargs"]["api_key"]["id"] == ["SEMKV_API_KEY"]
    monkeypatch.setenv("SEMKV_API_KEY", "from the environment")
    assert model(base_url="u").api_key.get_secret_value() == "from the environment"


@pytest.mark.parametrize("model", CLASSES)
def test_the_index_s_password_is_secret(model: type) -> None:
    llm = model(model="m", store="s", index_url="postgresql+psycopg://me:hush@there/index")
    shown = repr(llm) + str(llm) + dumps(llm) + str(llm._get_ls_params())
    assert "hush" not in shown
    assert dumpd(llm)["kwargs"]["index_url"]["id"] == ["SEMKV_INDEX_URL"]
    assert "hush" in llm.index_url.get_secret_value()


@pytest.mark.parametrize("model", CLASSES)
def test_it_is_serialised_and_back(model: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMKV_API_KEY", "hush")
    llm = model(
        model="m",
        store="s",
        engine_args={"dtype": "float32"},
        ratio=0.3,
        stop=["x"],
        prompt_cache=PromptCacheOptions(threshold=0.9),
        encoders={"vision": "phash"},
    )
    again = load(
        dumpd(llm),
        allowed_objects=[model],
        valid_namespaces=["langchain_semkv"],
        secrets_from_env=True,
    )
    assert again.model_dump() == llm.model_dump()
    assert again.api_key == llm.api_key


def test_what_decides_an_answer_is_in_the_cache_s_key() -> None:
    keys = {
        ChatSemKV(model="m", **options)._get_llm_string()
        for options in (
            {},
            {"ratio": 0.3},
            {"preset": "fast"},
            {"question_tokens": 12},
            {"reuse": False},
            {"temperature": 1},
            {"store": "s"},
            {"store": "s", "prompt_cache": {}},
            {"store": "s", "prompt_cache": {"reuse": "substitute"}},
        )
    }
    assert len(keys) == 9


@pytest.mark.parametrize("model", CLASSES)
def test_a_preset_and_what_stands_above_it(model: type) -> None:
    llm = model(model="m", preset="fast", ratio=0.4, question_tokens=12)
    of_both = {"preset": "fast", "ratio": 0.4, "question_tokens": 12}
    assert llm._reuse_options({}) == of_both
    assert llm._reuse_options({"selector": "chunk_head"}) == of_both | {"selector": "chunk_head"}
    # A call's preset is the whole of it: the object's ratio belongs to what it takes the place of.
    exact = {"preset": "exact", "question_tokens": 12}
    assert llm._reuse_options({"preset": "exact"}) == exact
    assert llm._reuse_options({"preset": "exact", "ratio": 0.9}) == exact | {"ratio": 0.9}


def test_tiers_as_options_or_as_their_fields() -> None:
    given: list[Any] = [PromptCacheOptions(), PromptCacheOptions().to_mapping(), {}]
    models = [ChatSemKV(model="m", store="s", prompt_cache=one) for one in given]
    assert len({model._get_llm_string() for model in models}) == 1
    assert models[0].prompt_cache == PromptCacheOptions().to_mapping()
    own = ChatSemKV(model="m", store="s", prompt_cache={}, encoders={"vision": PerceptualHash()})
    assert own.model_dump()["encoders"] == {"vision": "phash-8"}


def test_standard_parameters_start_no_engine() -> None:
    for model in CLASSES:
        params = model(model="m/not-there", max_tokens=7, stop=["x"])._get_ls_params()
        assert params["ls_provider"] == "semkv"
        assert params["ls_model_name"] == "m/not-there"
        assert params["ls_max_tokens"] == 7
        assert params["ls_stop"] == ["x"]


def test_tool_choice_in_openai_s_words() -> None:
    llm = ChatSemKV(model="m")

    def chosen(choice: Any) -> Any:
        bound: Any = llm.bind_tools([Joke], tool_choice=choice)
        return bound.kwargs.get("tool_choice")

    assert chosen(None) is None
    assert chosen("any") == chosen(True) == "required"
    assert chosen("none") == "none"
    assert chosen("Joke") == {"type": "function", "function": {"name": "Joke"}}
    with pytest.raises(OptionError, match="Joke"):
        chosen("Poem")


def test_structured_output_refuses_what_means_nothing() -> None:
    llm = ChatSemKV(model="m")
    with pytest.raises(OptionError, match="json_schema, function_calling or json_mode"):
        llm.with_structured_output(Joke, method="xml")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="strict"):
        llm.with_structured_output(Joke, method="json_mode", strict=True)


def test_messages_in_openai_s_words() -> None:
    image = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
    made = {"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    question, called, said = to_openai(
        [
            HumanMessage([{"type": "text", "text": "What is it?"}, image]),
            AIMessage([thought, {"type": "text", "text": "So:"}, made], tool_calls=[made]),
            ToolMessage("3", tool_call_id="1"),
        ]
    )
    parts: Any = question["content"]
    assert parts[1]["image_url"]["url"] == "data:image/png;base64,aGk="
    assert called["content"] == "So:"
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (said["role"], said["tool_call_id"]) == ("tool", "1")
    (seen,) = to_openai([HumanMessage([{"type": "video", "url": "https://example.org/a.mp4"}])])
    assert seen["content"] == [
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}
    ]
    with pytest.raises(OptionError, match="cannot be sent"):
        to_openai([HumanMessage([{"type": "image"}])])


def test_no_server_is_an_engine_error() -> None:
    for model in CLASSES:
        with pytest.raises(EngineError, match="does not answer"):
            model(base_url="http://127.0.0.1:9/v1", timeout=1, max_retries=0).invoke("Hello")


def test_an_index_without_a_vector_store_has_no_documents() -> None:
    index = SemKVIndex(llm=ChatSemKV(model="m", store="s"))
    with pytest.raises(OptionError, match="vector_store"):
        index.get(["1"])
    with pytest.raises(OptionError, match="vector_store"):
        index.invoke("who?")
    with pytest.raises(OptionError, match="ids"):
        index.delete()
