"""The wheel, where vLLM is not installed; and what a type checker sees of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from workbench.settings import ROOT

pytestmark = pytest.mark.slow

WITHOUT_VLLM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules["vllm"] = None  # as if it were not installed
import llama_index.llms.semkv
assert llama_index.llms.semkv.__file__.startswith(sys.argv[1]), llama_index.llms.semkv.__file__
from llama_index.core.schema import TextNode
from llama_index.llms.semkv import KVPrecompute, SemKV
from semkv_rag.errors import MissingExtraError
SemKV(base_url="http://localhost/v1")
llm = SemKV(model="some/model", store="somewhere")
for use in (lambda: llm.complete("prompt"), lambda: KVPrecompute(llm=llm)([TextNode(text="a")])):
    try:
        use()
    except MissingExtraError as error:
        print(error)
"""

USER = """
from typing import Literal

from llama_index.core import VectorStoreIndex
from llama_index.core.llms import CompletionResponse
from llama_index.core.schema import TextNode
from llama_index.llms.semkv import KVPrecompute, SemKV, close_engines, precompute_index

llm = SemKV(model="some/model", store="kv-store", ratio=0.3)
ratio: float | Literal["auto"] | None = llm.ratio
said: CompletionResponse = llm.complete("prompt")
tokens: int = llm.count_tokens("text")
KVPrecompute(llm=llm, prefix="You help.")([TextNode(text="a")])
stored: int = precompute_index(VectorStoreIndex([]), llm).chunks_captured
close_engines()
wrong: int = llm.ratio
wrong_too: str = llm.count_tokens("text")
precompute_index(wrong_index := 3, llm)
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def test_the_wheel_stands_alone_and_names_the_extra(tmp_path: Path) -> None:
    built = _run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
        *("--outdir", str(tmp_path), str(ROOT / "integrations" / "llama-index-llms-semkv")),
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
    assert "llama_index/llms/semkv/py.typed" in names
    # A namespace package: an __init__.py in these would hide llama-index-core.
    assert not {"llama_index/__init__.py", "llama_index/llms/__init__.py"} & set(names)
    assert not any("tests" in name for name in names)
    ended = _run(sys.executable, "-c", WITHOUT_VLLM, str(tmp_path / "installed"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("vllm is not installed: pip install 'semkv-rag[") == 2


def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    # With the project's own settings, strict as they are, so that its cache serves here too.
    checked = _run(
        *(sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")),
        *("--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache"), str(script)),
    )
    wrong = [n for n, text in enumerate(USER.splitlines(), 1) if "wrong" in text]
    lines = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert [int(line.split(":")[1]) for line in lines] == wrong, checked.stdout
