"""Engines are shared by what they are made of, end with the process, and Ctrl-C ends it cleanly.

In a process of its own: the engine is started there, at first use, as in a user's script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from workbench.settings import READER
from workbench.starts import program

SCRIPT = """
import asyncio, sys
from langchain_semkv import ChatSemKV, SemKVLLM
from llama_index.llms.semkv import SemKV
from semkv_rag.llm import shared

if __name__ == "__main__":
    options = dict(
        model=sys.argv[1], store=sys.argv[2],
        engine_args={"dtype": "float32", "kv_cache_memory_bytes": 256 << 20},
    )
    prompt = "The Mok pis school is led by Kim . Question : who leads Mok pis ? Answer :"
    chat, llm = ChatSemKV(**options), SemKVLLM(**options, max_tokens=4)
    assert not shared._engines, "nothing starts before it is used"
    first = asyncio.run(chat.ainvoke(prompt)).text
    assert llm.invoke(prompt) == first
    assert SemKV(**options).complete(prompt).text == first
    assert len(shared._engines) == 1, "all use one, LlamaIndex's class too"
    print(first, flush=True)
    for _ in chat.stream(prompt, max_tokens=900, ignore_eos=True):
        print("streaming", flush=True)
"""


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.soak
@pytest.mark.engine
def test_one_engine_for_all_until_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with (
        program(),
        subprocess.Popen(
            [sys.executable, str(script), str(READER), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline().split() == ["Kim"], process.stderr.read()[-4000:]
            assert process.stdout.readline() == "streaming\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            left = time.monotonic() + 20
            while _is_alive(process.pid) and time.monotonic() < left:
                time.sleep(0.1)
            assert not _is_alive(process.pid), "the engine's processes end with the script"
        finally:
            # The engine's processes, too: nobody else would end them.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert "\nKeyboardInterrupt\n" in errors, errors[-4000:]
    assert errors.count("Traceback") == 1, errors[-4000:]
