"""What cannot be served with reuse runs as plain vLLM, with one notice at start-up that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ENGINE_ARGS
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError
from semkv_rag.reuse import token_array
from tests.reference import PlainModel
from workbench.answers import SAMPLING, assert_same
from workbench.chunks import random_tokens

NOTICE = "semkv: this model is answered without reuse"

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # vLLM's MLA on AMX takes no float32.
    "MLA": ("deepseek_v2", {"dtype": "bfloat16"}, "MLA"),
    "sliding windows": ("mistral_sliding", {}, "sliding window of 64"),
    "hybrid cache groups": ("gemma3_sliding", {}, "sliding window of 64"),
    "learned positions": ("gpt2", {}, "positions are not relative"),
    "LoRA": ("qwen3", {"enable_lora": True, "max_lora_rank": 8}, "LoRA is on"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_runs_plain(
    case: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arch, arguments, words = CASES[case]
    folder, prompt = tiny_model(arch), random_tokens(1, 150)
    engine_args = {**ENGINE_ARGS, **arguments}
    with Engine(str(folder), store=tmp_path, **engine_args) as engine:
        assert not engine.gate.servable
        assert engine.gate.reason is not None
        assert words in engine.gate.reason
        answer = engine.generate(prompt, sampling=SAMPLING)
        assert answer.report.kv_cache == "skip"
        assert answer.report.reason is not None
        assert words in answer.report.reason
        item = CaptureItem("0" * 64, "default", "document", token_array(prompt), token_array([]))
        with pytest.raises(EngineError, match="cannot be served with reuse"):
            engine.capture([item])
    # Some obstacles show in the configuration, in this process; some in the engine's.
    output = capfd.readouterr()
    assert (caplog.text + output.out + output.err).count(NOTICE) == 1
    if case == "MLA":  # transformers computes another function there
        with Engine(str(folder), **engine_args) as plain:
            assert plain.gate.reason == "no store was given"
            assert_same(answer, plain.generate(prompt, sampling=SAMPLING))
    else:
        tokens, logprobs = PlainModel(folder).greedy(prompt, len(answer.token_ids))
        assert list(answer.token_ids) == tokens
        assert answer.logprobs is not None
        for position, expected in zip(answer.logprobs, logprobs, strict=True):
            for token, logprob in position.items():
                assert abs(logprob - float(expected[token])) <= 1e-4


def test_pipeline_parallel_is_an_obstacle(reader: Path) -> None:
    """Two processes for one tiny model would say no more than the configuration does."""
    from semkv_rag.config import ReuseOptions
    from semkv_rag.engine.launch import resolve, transfer_config

    transfer = transfer_config(
        Path("store"), index_url=None, reuse=ReuseOptions(), request_namespace=True
    )
    arguments = {**ENGINE_ARGS, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    config, obstacle = resolve(str(reader), arguments, transfer)
    assert obstacle == "pipeline parallel is on"
    assert config.kv_transfer_config is None
