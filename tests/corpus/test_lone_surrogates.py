"""Halves of UTF-16 pairs, which JSON may bring in, are named before any work is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.corpus import forget_sources, precompute, precompute_texts, split_text
from semkv_rag.corpus.prompt_file import read_prompts
from semkv_rag.corpus.warm import WarmPrompt, warm
from semkv_rag.errors import CorpusError, OptionError
from semkv_rag.prompt_cache import Cascade, PromptCacheOptions
from semkv_rag.reuse import token_array
from semkv_rag.store import KVStore
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine, word_tokenizer
from workbench.word_bags import WORDS

LONE = "w1 \ud83d"


def test_a_chunk_is_named_and_the_other_documents_are_stored(
    engine: MadeUpEngine, store: KVStore
) -> None:
    precompute_texts(engine, [("one", ["w1", "w2"])])
    result = precompute_texts(engine, [("one", ["w1", LONE]), ("two", ["w3"])])
    (failure,) = result.failures
    assert failure.source == "one"
    assert failure.reason == "chunk 2: U+D83D at character 3 is half of a UTF-16 pair"
    assert result.changed == 1
    names = {source.name for source in store.sources(FINGERPRINT, "default")}
    assert names == {"one", "two"}, "what was stored before stays"


@pytest.mark.parametrize(
    "documents",
    [
        [("one", ["w1"]), (LONE, ["w2"])],
        [("one", ["w1"]), (2, ["w2"])],
        [("one", ["w1"]), ("two", "w2")],
        [("one", ["w1"]), ("two", None)],
        [("one", ["w1"]), ("two", ["w2", None])],
    ],
)
def test_documents_that_are_none(engine: MadeUpEngine, documents: Any) -> None:
    with pytest.raises(OptionError, match=r"ud83d|2|two"):
        precompute_texts(engine, documents)
    assert engine.captured == []


@pytest.mark.parametrize("prefix", [LONE, None])
def test_a_prompt_prefix_that_is_none(engine: MadeUpEngine, docs: Path, prefix: Any) -> None:
    runs: list[Callable[[], object]] = [
        lambda: precompute(engine, [docs], prefix=prefix),
        lambda: precompute_texts(engine, [("one", ["w1"])], prefix=prefix),
    ]
    for run in runs:
        with pytest.raises(OptionError, match="the prompt prefix is"):
            run()
    assert engine.captured == []


def test_splitting() -> None:
    with pytest.raises(CorpusError, match="U\\+D83D at character 3"):
        split_text(LONE, word_tokenizer(), size=8)


@pytest.mark.parametrize("names", [[LONE], ["one", None], [3]])
def test_sources_to_forget(engine: MadeUpEngine, store: KVStore, names: Any) -> None:
    precompute_texts(engine, [("one", ["w1"])])
    with pytest.raises(OptionError, match="a source is called"):
        forget_sources(store, FINGERPRINT, "default", names)
    with pytest.raises(OptionError, match="namespace"):
        forget_sources(store, FINGERPRINT, "", ["one"])
    assert len(list(store.sources(FINGERPRINT, "default"))) == 1


def test_prompts_ahead(engine: MadeUpEngine, store: KVStore, tmp_path: Path) -> None:
    prompts = [
        WarmPrompt("line 1", LONE, token_array([1, 2]), "default"),
        WarmPrompt("line 2", "w2", token_array([3]), "default"),
    ]
    with Cascade(store, FINGERPRINT, PromptCacheOptions(), {"semantic": WORDS}) as cascade:
        result = warm(engine, cascade, prompts, max_tokens=10)
    assert [failure.source for failure in result.failures] == ["line 1"]
    assert (result.stored, len(engine.captured)) == (1, 1), "nothing is computed in vain"
    file = tmp_path / "prompts.jsonl"
    for line in (
        '{"prompt": "a\\ud83d"}',
        '{"prompt": "a", "source_version": "\\ud83d"}',
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    ):
        file.write_text(line)
        with pytest.raises(OptionError, match=r"jsonl:1: .*half of a UTF-16 pair"):
            read_prompts(file)
    file.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert read_prompts(file)[0].prompt == "😀"
    file.write_text("[" * 100_000)
    with pytest.raises(OptionError, match=r"jsonl:1: "):
        read_prompts(file)
