"""Engines are shared by what they are made of, and end by `close_engines`.

In a process of its own: the engine is started there, at first use, as in a user's script.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.starts import run_program

SCRIPT = """
import sys, threading
from semkv_rag.backend import LocalBackend, close_engines, shared, shared_engine

arguments = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
prompt = "The Mok pis school is led by Kim . Question : who leads Mok pis ? Answer :"

def ask(answers):
    engine = shared_engine(sys.argv[1], sys.argv[2], None, arguments)
    answers.append((LocalBackend(engine).answer(prompt, {"temperature": 0}, {}).text, engine))

answers = []
threads = [threading.Thread(target=ask, args=(answers,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len({id(engine) for _, engine in answers}) == 1, "all use one"
assert len(shared._engines) == 1
close_engines()
assert not shared._engines
ask(answers)
assert len({text for text, _ in answers}) == 1, "started again"
print(answers[0][0])
"""


@pytest.mark.engine
def test_threads_share_an_engine_until_it_is_closed(reader: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run_program(sys.executable, script, reader, tmp_path / "store")
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == ["Kim"]
