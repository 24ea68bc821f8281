"""A model that is not there is told at once, without vLLM, and nothing is made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.model_name import check_model
from workbench.settings import READER


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/model", "there is no model at '/nowhere/model'"),
        ("./model", "give a folder or a hub's name"),
        ("~/model", "there is no model at"),
        ("models/of/mine", "there is no model at"),
        ("", "no model is given"),
        ("two words", "no name that a hub could know"),
    ],
)
def test_what_can_be_no_model(name: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        check_model(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "readme.md").touch()
    with pytest.raises(OptionError, match=r"holds no model: config\.json is missing"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    check_model(str(tmp_path))


def test_what_may_be_one(tmp_path: Path) -> None:
    check_model(str(READER))
    check_model("s3://bucket/model")
    (tmp_path / "model.gguf").touch()
    check_model(str(tmp_path))
    check_model(str(tmp_path / "model.gguf"))


def test_a_hub_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OptionError, match="not in the hub's cache"):
        check_model("semkv-rag/is-not-there")


def test_what_the_hub_s_cache_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    check_model("owner/name", str(tmp_path))
    check_model("owner/name:Q4_K_M", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["precompute", "serve", "ask"])
def test_a_command_says_so_without_vllm_and_makes_no_store(tmp_path: Path, verb: str) -> None:
    store = tmp_path / "kv"
    arguments = {
        "precompute": ["precompute", str(tmp_path), "--model", "/nowhere", "--store", str(store)],
        "serve": ["serve", "/nowhere", "--store", str(store)],
        "ask": ["ask", "a question", "--model", "/nowhere", "--store", str(store)],
    }[verb]
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from semkv_rag.cli import main; sys.argv = ['semkv', *sys.argv[1:]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no model at '/nowhere'" in done.stderr
    assert not store.exists()
