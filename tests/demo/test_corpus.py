"""`examples/corpus`: what the generator promises, of the files that are in the repository."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from make_corpus import CORPUS, MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS, write_corpus
from transformers import AutoTokenizer

from semkv_rag.corpus import split_text

READER = CORPUS.parent / "reader"
TEXTS = {path.relative_to(CORPUS).as_posix(): path.read_text() for path in CORPUS.rglob("*.txt")}
QUESTIONS: list[dict[str, Any]] = json.loads((CORPUS / "questions.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(READER)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_corpus_is_what_the_generator_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert _files(tmp_path) == _files(CORPUS)


def test_another_seed_writes_another_corpus(tmp_path: Path) -> None:
    write_corpus(tmp_path, seed=2)
    assert not set(_files(tmp_path).values()) & set(_files(CORPUS).values())


def test_there_are_enough_documents_and_questions() -> None:
    assert len(TEXTS) >= 30
    assert len(QUESTIONS) >= 30
    assert {question["source"] for question in QUESTIONS} == set(TEXTS)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_splitter_cuts_between_paragraphs_and_nowhere_else(name: str, tokenizer: Any) -> None:
    paragraphs = TEXTS[name].strip().split("\n\n")
    chunks = [chunk.text for chunk in split_text(TEXTS[name], tokenizer, MAX_CHUNK_TOKENS)]
    assert chunks == paragraphs
    assert 2 <= len(chunks) <= 3
    sizes = [len(tokenizer.encode(chunk)) for chunk in chunks]
    assert min(sizes) >= MIN_CHUNK_TOKENS
    assert max(sizes) <= MAX_CHUNK_TOKENS


def test_the_reader_knows_every_word(tokenizer: Any) -> None:
    texts = [*TEXTS.values(), *(f"{q['question']} {q['answer']}" for q in QUESTIONS)]
    for text in texts:
        assert tokenizer.unk_token_id not in tokenizer.encode(text), text


def _name(question: dict[str, Any]) -> str:
    name = re.search(r"\b[A-Z][a-z]+ [a-z]+\b", question["question"].partition(" ")[2])
    assert name is not None
    return name[0]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["question"])
def test_the_answer_is_in_the_document_once(question: dict[str, Any]) -> None:
    text = TEXTS[question["source"]]
    name, words = _name(question).split(), text.split()
    assert " ".join(name) in text
    assert words.count(question["answer"]) == 1
    with_answer = next(part for part in text.split("\n\n") if question["answer"] in part.split())
    assert question["cross"] == (" ".join(name) not in with_answer)


def test_no_other_document_of_the_folder_has_the_answer() -> None:
    for question in QUESTIONS:
        folder = question["source"].partition("/")[0]
        holders = [
            name
            for name, text in TEXTS.items()
            if name.startswith(folder + "/") and question["answer"] in text.split()
        ]
        assert holders == [question["source"]]


def test_names_share_no_first_and_no_second_syllable() -> None:
    for syllables in zip(*(Path(name).stem.split("-") for name in TEXTS), strict=True):
        assert max(Counter(syllables).values()) == 1
