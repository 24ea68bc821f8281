"""The prefix of prompts that go through a chat template: found from the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from semkv_rag.cli import precompute as verb
from semkv_rag.corpus import PrecomputeResult
from semkv_rag.corpus.chat_prefix import chat_prefix
from semkv_rag.errors import OptionError
from tests.cli.conftest import Semkv
from workbench.tiny_models import build_tiny_model

RULE = "Answer by the passages.\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("chat-prefix"))


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model)


def test_it_is_what_the_template_makes_of_the_beginning(tokenizer: Any) -> None:
    assert chat_prefix(tokenizer, RULE) == f"user: {RULE}"
    assert chat_prefix(tokenizer, RULE, "Be brief.") == f"system: Be brief.\nuser: {RULE}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the chat template does not take the messages"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ messages[0].role }}", "leaves out the user's message"),
    ],
)
def test_a_template_that_does_not_serve(tokenizer: Any, template: str | None, words: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(OptionError, match=words):
        chat_prefix(tokenizer, RULE, "Be brief.")


def test_the_verb_stores_behind_it(
    semkv: Semkv, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes: list[str] = []

    def noted(*_: Any, prefix: str, **__: Any) -> PrecomputeResult:
        prefixes.append(prefix)
        return PrecomputeResult()

    monkeypatch.setattr(verb, "precompute", noted)
    (tmp_path / "a.txt").write_text("A.")
    command = ("precompute", tmp_path / "a.txt", "--model", model, "--store", tmp_path / "kv")
    assert semkv(*command, "--prefix", RULE).code == 0
    assert semkv(*command, "--prefix", RULE, "--chat").code == 0
    assert semkv(*command, "--chat", "--system", "Be brief.").code == 0
    assert prefixes == [RULE, f"user: {RULE}", "system: Be brief.\nuser: "]
    refused = semkv(*command, "--system", "Be brief.")
    assert refused.code == 2 and "--chat" in refused.err
