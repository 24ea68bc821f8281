"""What stands to the left of a chunk while it is computed, and what a change there changes."""

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from semkv_rag.corpus import CONTEXT_MODES, PrecomputeResult, precompute, precompute_texts
from semkv_rag.corpus.context import context_modes, prefix_tokens, texts_before
from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore
from tests.corpus.conftest import sentence
from tests.corpus.made_up_engine import (
    BOS,
    FINGERPRINT,
    MadeUpEngine,
    precompute_until_killed,
    word_tokenizer,
)

BOTH = ("prefix", "left")


def run(engine: MadeUpEngine, *paths: Path, **options: object) -> PrecomputeResult:
    return precompute(engine, paths, **{"chunk_tokens": 8, "context": ("prefix",), **options})  # type: ignore[arg-type]


def variants(engine: MadeUpEngine) -> set[tuple[str, str]]:
    """The captured document chunks as (context, chunk), without the prefix's first token.

    None of the built-in passage's words is known to this tokenizer.
    """
    decode = engine.tokenizer.decode
    passage = re.compile(r"<unk>( <unk>)*")
    return {
        (
            passage.sub("passage", decode(item.context).removeprefix("<s>").strip()),
            decode(item.tokens),
        )
        for item in engine.captured
        if item.kind == "document"
    }


def stored(store: KVStore) -> set[str]:
    return {record.id for record in store.chunks()}


def listed(store: KVStore) -> set[str]:
    return {id_ for source in store.sources() for id_ in source.chunk_ids}


def test_modes_are_named_once_and_in_one_order() -> None:
    assert context_modes(["left", "prefix", "left"]) == ("prefix", "left")
    assert context_modes("left") == ("left",)
    with pytest.raises(OptionError):
        context_modes(["neighbour"])


def test_the_document_so_far_stands_behind_the_prompt_prefix(
    docs: Path, engine: MadeUpEngine
) -> None:
    result = run(engine, docs, prefix="w9", context=("left",))
    assert variants(engine) == {
        ("w9 passage", sentence(1)),  # the first of a document has nothing before it
        (f"w9 {sentence(1)}", sentence(0)),
        (f"w9 {sentence(1)} {sentence(0)}", sentence(2)),
        ("w9 passage", sentence(3)),
        (f"w9 {sentence(3)}", sentence(0)),
        (f"w9 {sentence(3)} {sentence(0)}", sentence(4)),
    }
    assert result.tokens == 6 * 8 + 2, "what stands before a chunk is computed, not stored"


def lengths_before(chunks: list[int], room: int) -> list[int]:
    """The lengths of the texts before a document's chunks, which end where the chunks begin."""
    ends = np.cumsum(chunks)
    document = np.arange(ends[-1], dtype=np.int32)
    parts = [document[end - length : end] for end, length in zip(ends, chunks, strict=True)]
    before = list(texts_before(parts, room))
    for part, text in zip(parts, before, strict=True):
        assert text.tolist() == document[part[0] - len(text) : part[0]].tolist()
    return [len(text) for text in before]


def test_of_a_long_document_the_last_chunks_stand_before_one() -> None:
    assert lengths_before([256] * 9, 8192) == [256 * number for number in range(9)]
    grows = [512 + 256 * number for number in range(7)]
    assert lengths_before([256] * 23, 8192) == [0, 256, *grows, *grows, *grows]
    assert lengths_before([4096, 100, 100, 4096, 100], 9000) == [0, 4096, 4196, 4296, 4096]
    assert lengths_before([100, 700, 700, 700, 100], 9000) == [0, 100, 800, 1500, 700]


def test_of_a_model_with_little_room_fewer_chunks_stand_before_one() -> None:
    assert lengths_before([64] * 8, 256) == [0, 64, 128, 192, 192, 192, 192, 192]
    # A single chunk is given whole; `Contexts` cuts it.
    assert lengths_before([64] * 4, 100) == [0, 64, 64, 64]


def test_a_document_in_a_prompt_is_exact_from_its_first_chunk_on(
    docs: Path, engine: MadeUpEngine
) -> None:
    run(engine, docs, prefix="w9", context=BOTH)
    prompt = engine.tokenizer.encode(f"w9 {sentence(1)} {sentence(0)} {sentence(2)}")
    exact = [
        item
        for item in engine.captured
        if [*item.context, *item.tokens] == prompt[: len(item.context) + len(item.tokens)]
    ]
    assert sum(len(item.tokens) for item in exact) == len(prompt)


def test_variants_stand_side_by_side(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    assert run(engine, docs, context=BOTH).chunks_captured == 11
    assert len({item.id for item in engine.captured}) == 11
    assert listed(store) == stored(store) == {item.id for item in engine.captured}
    source = store.source(FINGERPRINT, "default", "docs/a.txt")
    assert source is not None
    assert len(source.chunk_ids) == 6
    assert store.verify().ok
    assert run(engine, docs, context=BOTH[::-1]).unchanged == 2, "their order says nothing"


def test_a_mode_more_or_less_is_a_change(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    run(engine, docs)
    result = run(engine, docs, context=BOTH)
    assert (result.changed, result.chunks_captured) == (2, 6), (
        "those behind the prefix alone were there"
    )
    result = run(engine, docs)
    assert (result.changed, result.chunks_captured) == (2, 0)
    assert len(stored(store)) == 5, "the left variants are gone"


def test_a_change_makes_the_chunks_behind_it_new_ones(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    run(engine, docs, context=BOTH)
    engine.captured.clear()
    (docs / "a.txt").write_text(f"{sentence(1)} {sentence(9)} {sentence(2)}")
    result = run(engine, docs, context=BOTH)
    assert (result.changed, result.unchanged) == (1, 1)
    assert variants(engine) == {
        ("", sentence(9)),
        (sentence(1), sentence(9)),
        (f"{sentence(1)} {sentence(9)}", sentence(2)),
    }
    assert listed(store) == stored(store)
    (docs / "a.txt").unlink()
    assert run(engine, docs, context=BOTH, sync=True).removed == 1
    assert len(stored(store)) == 6
    assert store.verify().ok


def test_texts_stand_behind_the_text_before(engine: MadeUpEngine) -> None:
    precompute_texts(engine, [("one", ["w1", " ", "w2"]), ("two", ["w3"])], context=("left",))
    assert variants(engine) == {("passage", "w1"), ("w1", "w2"), ("passage", "w3")}


def test_what_is_not_behind_the_prefix_alone_is_compared_with_it(
    docs: Path, engine: MadeUpEngine
) -> None:
    run(engine, docs, prefix="w9", context=BOTH)
    chunks = [item for item in engine.captured if item.kind == "document"]
    prefix = engine.tokenizer.encode("w9")
    assert {item.reference is None for item in chunks} == {True, False}
    for item in chunks:
        behind_prefix = item.context.tolist() == prefix
        assert (item.reference is None) == behind_prefix
        assert item.reference is None or item.reference.tolist() == prefix


def test_evicted_variants_are_computed_again(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    run(engine, docs, context=CONTEXT_MODES)
    behind = [item.id for item in engine.captured if len(item.context) > 1]
    store.remove(FINGERPRINT, "default", behind)
    assert run(engine, docs, context=CONTEXT_MODES).chunks_captured == len(behind)


@pytest.mark.parametrize("chunks", [3, 40])
def test_a_killed_run_is_gone_on_with(tmp_path: Path, chunks: int) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(
            " ".join(map(sentence, range(6 * number, 6 * number + 6)))
        )
    precompute_until_killed(tmp_path / "store", folder, chunks, BOTH)
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        assert run(engine, folder, context=BOTH).chunks_captured == 72 - chunks
        assert len(stored(store)) == 72
        assert store.verify().ok


def test_of_a_text_too_long_the_end_is_taken(docs: Path, engine: MadeUpEngine) -> None:
    engine.max_model_len = 1 + 5 + 8 + 1
    run(engine, docs, context=("left",))
    (context,) = {c for c, tokens in variants(engine) if tokens == sentence(2)}
    assert context == " ".join(sentence(0).split()[-5:])
    longest = max(len(item.context) + len(item.tokens) for item in engine.captured)
    assert longest == engine.max_model_len - 1


# The first token


def test_no_chunk_stands_at_the_prompts_start(docs: Path, store: KVStore) -> None:
    engine = MadeUpEngine(store, bos=False)
    run(engine, docs, context=BOTH)
    (neutral,) = {item.context[0] for item in engine.captured}
    assert engine.tokenizer.decode(neutral) == ".", "this tokenizer has no token for a new line"
    assert {len(item.context) for item in engine.captured} == {1, 9, 17, 55}


def test_what_a_prompt_starts_with_stands_there_alone() -> None:
    assert prefix_tokens(word_tokenizer(bos=True)).tolist() == [BOS]
    without = word_tokenizer(bos=False)
    assert prefix_tokens(without, "w1 w2").tolist() == without.encode("w1 w2")
    assert len(prefix_tokens(without, " ")) == 1


def test_a_prompt_prefix_ends_in_the_tokens_that_it_has_before_a_text() -> None:
    """As GPT-2's and SmolLM2's tokenizers: two line ends are one token at a text's end alone."""
    words = {"\u010a": 0, "\u010a\u010a": 1, "a": 2, "b": 3, "1": 4}
    pieces = Tokenizer(models.BPE(vocab=words, merges=[("\u010a", "\u010a")]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    prefix, text = "a\n\n", "b"
    assert tokenizer.encode(prefix) + tokenizer.encode(text) != tokenizer.encode(prefix + text)
    assert [*prefix_tokens(tokenizer, prefix), *tokenizer.encode(text)] == tokenizer.encode(
        prefix + text
    )
    assert prefix_tokens(tokenizer, "a1").tolist() == [2, 4]


def test_a_prompt_prefix_of_no_tokens_is_not_stored(docs: Path, store: KVStore) -> None:
    engine = MadeUpEngine(store, bos=False)
    run(engine, docs, prefix="  ")
    assert {item.kind for item in engine.captured} == {"document"}
