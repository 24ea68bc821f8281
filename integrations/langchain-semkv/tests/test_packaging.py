"""The wheel, where vLLM is not installed; and what a type checker sees of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from conftest import ROOT

WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # as if it were not installed
import langchain_semkv
assert langchain_semkv.__file__.startswith(sys.argv[1]), langchain_semkv.__file__
from langchain_semkv import ChatSemKV, SemKVIndex, SemKVLLM, SemKVPrecompute
from semkv_rag.errors import MissingExtraError
ChatSemKV(base_url="http://localhost/v1")
for model in (ChatSemKV, SemKVLLM):
    try:
        model(model="some/model", store="somewhere").invoke("Hello")
    except MissingExtraError as error:
        print(error)
"""

USER = """
from collections.abc import Iterator

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_semkv import ChatSemKV, SemKVIndex, SemKVLLM, SemKVPrecompute, close_engines

llm = ChatSemKV(model="some/model", store="kv-store", ratio=0.3)
said: AIMessage = llm.invoke("Hello")
text: str = SemKVLLM(model="some/model").invoke("Hello")
parts: Iterator[str] = SemKVLLM(model="some/model").stream("Hello")
ratio: float | None = llm.ratio
SemKVPrecompute(llm, head="You help.").transform_documents([Document("a")])
SemKVIndex(llm=llm).upsert([Document("a")])
close_engines()
wrong: int = llm.ratio
also_wrong: int = SemKVLLM(model="some/model").invoke("Hello")
SemKVPrecompute(llm, heat="")
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_wheel_stands_alone_and_names_the_extra(tmp_path: Path) -> None:
    project = ROOT / "integrations" / "langchain-semkv"
    built = _run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
        *("--outdir", str(tmp_path), str(project)),
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
    assert "langchain_semkv/py.typed" in names
    assert not any("tests" in name for name in names)
    folder = str(tmp_path / "installed")
    script = f"import sys; sys.path.insert(0, {folder!r}); sys.argv = ['', {folder!r}]\n"
    ended = _run(sys.executable, "-c", script + WITHOUT_VLLM)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("vllm is not installed: pip install 'semkv-rag[") == 2


def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    checked = _run(
        *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"),
        *("--cache-dir", str(tmp_path / "cache"), str(script)),
    )
    lines = checked.stdout.splitlines()
    wrong = [
        number
        for number, text in enumerate(USER.splitlines(), 1)
        if text.startswith(("wrong", "also", "SemKVPrecompute(llm, heat"))
    ]
    assert [int(line.split(":")[1]) for line in lines if ": error:" in line] == wrong, (
        checked.stdout
    )
