"""What a `SemKV` says of its options before any engine is started."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import LLM
from llama_index.llms.semkv import SemKV

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import PerceptualHash, PromptCacheOptions


def test_it_is_a_llama_index_llm() -> None:
    llm = SemKV(model="anything", store="somewhere")
    assert isinstance(llm, LLM)
    assert llm.class_name() == "SemKV"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give a model"),
        ({"model": "m", "ratio": 1.5}, "ratio is 1.5"),
        ({"model": "m", "ratoi": 0.5}, "SemKV has no option 'ratoi': did you mean ratio"),
        ({"model": "m", "top_p": 0.5}, "'top_p': sampling= takes fields of vLLM's"),
        ({"model": "m", "selector": "best"}, "kv_deviation"),
        ({"model": "m", "check_layer": 0}, "check_layer"),
        ({"model": "m", "preset": "best"}, "preset is 'best': use one of fast, balanced, exact"),
        ({"model": "m", "question_tokens": 0}, "question_tokens is 0"),
        ({"model": "m", "namespace": ""}, "namespace"),
        ({"model": "m", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "temperature": -1}, "temperature"),
        ({"model": "m", "timeout": 0}, "timeout"),
        ({"model": "m", "engine_args": "bf16"}, "engine_args"),
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
        ({"base_url": "http://localhost/v1", "ram_bytes": 5}, "server's"),
        ({"base_url": "http://localhost/v1", "store": "s"}, "server's"),
        ({"base_url": "http://localhost/v1", "engine_args": {"dtype": "auto"}}, "server's"),
    ],
)
def test_an_impossible_option_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SemKV(**options)


def test_several_faults_are_named_together() -> None:
    with pytest.raises(OptionError, match=r"max_tokens.*temperature"):
        SemKV(model="m", max_tokens=0, temperature=-1)


def test_the_key_is_not_serialised_and_not_shown() -> None:
    llm = SemKV(base_url="http://localhost/v1", api_key="secret")
    assert "secret" not in str(llm.to_dict())
    assert "secret" not in repr(llm)
    assert "secret" not in str(llm.to_payload())


def test_the_index_s_password_is_not_serialised_and_not_shown() -> None:
    llm = SemKV(model="m", store="s", index_url="postgresql+psycopg://me:hush@there/index")
    assert "hush" not in str(llm.to_dict()) + repr(llm) + str(llm.to_payload())


def test_an_event_s_payload_does_not_start_the_engine() -> None:
    llm = SemKV(model="a/model-that-is-not-there", ratio=0.2)
    assert llm.to_payload() == {
        "class_name": "SemKV",
        "model": "a/model-that-is-not-there",
        "lora": None,
        "base_url": None,
        "max_tokens": 256,
        "temperature": 0.0,
        "reuse": True,
        "preset": None,
        "ratio": 0.2,
        "selector": None,
        "check_layer": None,
        "question_tokens": None,
        "token_map": None,
        "namespace": None,
    }


def test_a_preset_and_what_stands_above_it() -> None:
    llm = SemKV("m", preset="fast", ratio=0.4, question_tokens=12)
    _, of_both = llm._options({"top_p": 0.9})
    assert of_both == {"preset": "fast", "ratio": 0.4, "question_tokens": 12}
    # A call's preset is the whole of it: the object's ratio belongs to what it takes the place of.
    sampling, reuse = llm._options({"preset": "exact", "top_p": 0.9})
    assert reuse == {"preset": "exact", "question_tokens": 12}
    assert "preset" not in sampling and sampling["top_p"] == 0.9
    assert SemKV.from_dict(llm.to_dict()).preset == "fast"


def test_tiers_as_options_or_as_their_fields() -> None:
    given: list[Any] = [PromptCacheOptions(), PromptCacheOptions().to_mapping(), {}]
    models = [SemKV("m", "s", prompt_cache=one) for one in given]
    assert [model.prompt_cache for model in models] == [PromptCacheOptions().to_mapping()] * 3
    own = SemKV("m", "s", prompt_cache={}, encoders={"vision": PerceptualHash()})
    assert own.to_dict()["encoders"] == {"vision": "phash-8"}
    assert SemKV.from_dict(models[0].to_dict()).prompt_cache == models[0].prompt_cache
