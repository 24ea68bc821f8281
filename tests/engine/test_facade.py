"""The engine's own surface: sync, async, streams, scripts, notebooks, the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine, model_fingerprint
from semkv_rag.engine.completion import join
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.store import KVStore
from workbench.answers import SAMPLING, assert_same
from workbench.chunks import random_tokens
from workbench.engines import Engines
from workbench.settings import ENGINE_ARGS
from workbench.starts import run_program

PROMPT = random_tokens(401, 60)
TEXT = "Question : who leads Tre klim ? Answer :"


def test_all_ways_to_ask_say_the_same(engine: Engine) -> None:
    whole = engine.generate(PROMPT, sampling=SAMPLING)
    parts = list(engine.stream(PROMPT, sampling=SAMPLING))
    assert len(parts) == len(whole.token_ids)
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert_same(join(parts), whole)
    for answer in engine.generate_many([PROMPT, PROMPT[::-1], PROMPT], sampling=SAMPLING)[::2]:
        assert_same(answer, whole)
    assert 0 < whole.ttft_ms <= whole.latency_ms


async def test_in_a_running_loop(engine: Engine) -> None:
    """As in a notebook: the caller's loop runs, and the engine has one of its own."""
    whole = engine.generate(PROMPT, sampling=SAMPLING)
    assert_same(await engine.agenerate(PROMPT, sampling=SAMPLING), whole)
    parts = [part async for part in engine.astream(PROMPT, sampling=SAMPLING)]
    assert_same(join(parts), whole)


def test_text_and_its_tokens_are_the_same_prompt(engine: Engine) -> None:
    tokens = engine.tokenizer(TEXT).input_ids
    text = engine.generate(TEXT, sampling=SAMPLING)
    assert text.prompt_tokens == len(tokens)
    assert_same(text, engine.generate(tokens, sampling=SAMPLING))


@pytest.mark.parametrize(
    "options",
    [{"ratio": 1.1}, {"ratio": True}, {"selector": "best"}, {"check_layer": 0}, {"namespace": ""}],
    ids=str,
)
def test_a_wrong_option_names_what_is_right(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="use"):
        ReuseOptions(**options)  # type: ignore[arg-type]


def test_a_wrong_engine_argument_is_named(reader: Path) -> None:
    with pytest.raises(OptionError, match="no_such_argument"):
        Engine(str(reader), no_such_argument=1)


@pytest.mark.slow
def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=r"holds no model: config\.json is missing"):
        Engine(str(tmp_path / "empty"), store=tmp_path / "store")
    assert not (tmp_path / "store").exists()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="cannot load"):
        Engine(str(tmp_path / "empty"))


def test_an_engine_that_does_not_start_says_so_and_lets_go_of_its_store(
    engines: Engines, reader: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="vLLM did not start"):
        engines.own(reader, store=tmp_path / "store", kv_cache_memory_bytes=1 << 10)
    with KVStore(tmp_path / "store") as store:
        assert store.verify().ok


def test_the_fingerprint_is_known_without_an_engine(engine: Engine, reader: Path) -> None:
    assert model_fingerprint(str(reader), **ENGINE_ARGS) == engine.fingerprint
    # What changes no KV changes no fingerprint, and the other way round.
    assert model_fingerprint(str(reader), dtype="float32", max_model_len=512) == engine.fingerprint
    assert model_fingerprint(str(reader), dtype="bfloat16") != engine.fingerprint


SCRIPT = """
from semkv_rag import Engine

engine = Engine({reader!r}, store={store!r}, dtype="float32", max_model_len=256,
                kv_cache_memory_bytes=1 << 26)
answer = engine.generate({text!r}, sampling={{"max_tokens": 1, "temperature": 0}})
print("answered", answer.report.kv_cache)
"""


@pytest.mark.soak
@pytest.mark.engine
def test_a_plain_script_needs_no_main_guard_and_ends(reader: Path, tmp_path: Path) -> None:
    """No `if __name__ == "__main__"`, no `close`: it answers once, and the process ends."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(reader=str(reader), store=str(tmp_path / "store"), text=TEXT))
    done = run_program(sys.executable, script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines().count("answered miss") == 1
