"""The wheel, where vLLM is not installed; and what a type checker sees of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from workbench.settings import ROOT

pytestmark = pytest.mark.slow

WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # as if it were not installed
import langchain_semkv, semkv_rag
for package in (langchain_semkv, semkv_rag):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
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
from typing import Literal

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_semkv import ChatSemKV, SemKVIndex, SemKVLLM, SemKVPrecompute, close_engines

llm = ChatSemKV(model="some/model", store="kv-store", ratio=0.3)
said: AIMessage = llm.invoke("Hello")
text: str = SemKVLLM(model="some/model").invoke("Hello")
parts: Iterator[str] = SemKVLLM(model="some/model").stream("Hello")
ratio: float | Literal["auto"] | None = llm.ratio
SemKVPrecompute(llm, prefix="You help.").transform_documents([Document("a")])
SemKVIndex(llm=llm).upsert([Document("a")])
close_engines()
wrong: int = llm.ratio
also_wrong: int = SemKVLLM(model="some/model").invoke("Hello")
SemKVPrecompute(llm, heat="")
"""


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_wheels_stand_alone_and_name_the_extra(tmp_path: Path) -> None:
    """Both are installed into an empty environment, which sees this one's other packages."""
    for project in (ROOT, ROOT / "integrations" / "langchain-semkv"):
        built = _run(
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
            *("--outdir", str(tmp_path), str(project)),
        )
        assert built.returncode == 0, built.stdout + built.stderr
    wheels = sorted(map(str, tmp_path.glob("*.whl")))
    assert len(wheels) == 2
    with zipfile.ZipFile(wheels[0]) as packed:
        names = packed.namelist()
    assert "langchain_semkv/py.typed" in names
    assert not any("tests" in name for name in names)
    venv.create(tmp_path / "empty")
    python = str(tmp_path / "empty" / "bin" / "python")
    installed = _run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", *wheels),
    )
    assert installed.returncode == 0, installed.stderr
    # A folder on the path has no .pth files read: what is installed for editing here is not seen.
    others = sysconfig.get_path("purelib")
    ended = _run(python, "-P", "-c", WITHOUT_VLLM, str(tmp_path), PYTHONPATH=others)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("vllm is not installed: pip install 'semkv-rag[") == 2


def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    # With the project's own settings, strict as they are, so that its cache serves here too.
    settings = str(ROOT / "pyproject.toml")
    checked = _run(
        *(sys.executable, "-m", "mypy", "--config-file", settings, "--no-error-summary"),
        *("--cache-dir", str(ROOT / ".mypy_cache"), str(script)),
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
