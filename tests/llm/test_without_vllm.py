"""A client of a server needs no vLLM; who needs it is told what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["vllm"] = None  # as if it were not installed
from semkv_rag.llm import RemoteBackend, shared_engine
from semkv_rag.errors import MissingExtraError
RemoteBackend("http://localhost/v1")
try:
    shared_engine("some/model", "somewhere", None, {})
except MissingExtraError as error:
    print(error)
"""


@pytest.mark.slow
def test_only_an_engine_in_this_process_needs_vllm() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "vllm is not installed: pip install 'semkv-rag[" in ended.stdout
