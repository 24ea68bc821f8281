"""Engines are shared by what they are made of, and end by `close_engines`.

In a process of its own: the engine is started there, at first use, as in a user's script.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

READER = Path(__file__).parents[3] / "examples" / "reader"
SCRIPT = """
import asyncio, sys
from llama_index.llms.semkv import SemKV, close_engines
from semkv_rag.backend import shared

if __name__ == "__main__":
    options = dict(
        model=sys.argv[1], store=sys.argv[2],
        engine_args={"dtype": "float32", "kv_cache_memory_bytes": 256 << 20},
    )
    prompt = "The Mok pis school is led by Kim . Question : who leads Mok pis ? Answer :"
    one, other = SemKV(**options), SemKV(**options, max_tokens=4)
    assert not shared._engines, "nothing starts before it is used"
    first = asyncio.run(one.acomplete(prompt)).text
    assert other.complete(prompt).text == first
    assert len(shared._engines) == 1, "both use one"
    close_engines()
    assert not shared._engines
    assert one.complete(prompt).text == first, "started again"
    print(first)
"""


def test_two_objects_share_an_engine_until_it_is_closed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script), str(READER), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == ["Kim"]
