"""What cannot be served with reuse runs as plain vLLM, with one notice at start-up that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine.launch import engine_arguments, resolve, transfer_config
from semkv_rag.errors import EngineError
from semkv_rag.reuse import token_array
from semkv_rag.store import place_of
from tests.reference import PlainModel
from workbench.answers import SAMPLING
from workbench.chunks import random_tokens
from workbench.engines import Engines
from workbench.settings import ENGINE_ARGS

NOTICE = "semkv: this model is answered without reuse"

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "learned positions": ("gpt2", {}, "positions are not relative"),
    "LoRA of two layouts": (
        "qwen3",
        {"enable_lora": True, "enable_mixed_moe_lora_format": True},
        "LoRA adapters of two layouts are on",
    ),
}
IN_CONFIGURATION = ("LoRA of two layouts",)
"""Refused before anything starts; that they answer all the same is for `make soak`."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.soak] * (case in IN_CONFIGURATION)) for case in CASES],
)
def test_it_runs_plain(
    case: str,
    engines: Engines,
    tiny_model: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arch, arguments, words = CASES[case]
    folder, prompt = tiny_model(arch), random_tokens(1, 150)
    with engines.own(folder, **arguments) as engine:
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
        stats = engine.stats()
        assert stats["semkv_servable"] == 0
        # Where the configuration is refused no connector runs, which would count.
        counted = None if case in IN_CONFIGURATION else {"model": 1}
        assert stats.get("semkv_plain_requests_total") == counted
    # Some obstacles show in the configuration, in this process; some in the engine's.
    output = capfd.readouterr()
    assert (caplog.text + output.out + output.err).count(NOTICE) == 1
    tokens, logprobs = PlainModel(folder).greedy(prompt, len(answer.token_ids))
    assert list(answer.token_ids) == tokens
    assert answer.logprobs is not None
    for position, expected in zip(answer.logprobs, logprobs, strict=True):
        for token, logprob in position.items():
            assert abs(logprob - float(expected[token])) <= 1e-4


@pytest.mark.soak
def test_latents_that_vllm_turns_wrongly_are_refused(
    engines: Engines, tiny_model: Callable[[str], Path]
) -> None:
    """Without YaRN, on a CPU. A vLLM that turns them rightly ends this test (docs/models.md)."""
    with engines.own(tiny_model("deepseek_unscaled")) as engine:
        assert "cannot be moved to another position" in (engine.gate.reason or "")


BEFORE = {
    "sparse MLA": ("deepseek_sparse", {}, "its MLA is sparse"),
    "recurrent layers beside attention": ("lfm2", {}, "recurrent layers beside attention"),
    "recurrent layers": ("mamba2", {}, "all its layers are recurrent"),
    "latents in 8 bits": ("deepseek_v2", {"kv_cache_dtype": "fp8"}, "keeps latents in 8 bits"),
    "LoRA of the vision tower": (
        "llava",
        {"enable_lora": True, "enable_tower_connector_lora": True, "model_impl": "transformers"},
        "LoRA of the vision tower is on",
    ),
    "experts over data parallel ranks": (
        "qwen2_moe",
        {"data_parallel_size": 2, "distributed_executor_backend": "mp"},
        "experts that are spread over data parallel ranks",
    ),
}
"""Refused before anything starts, and not started by the tests."""


@pytest.mark.parametrize("case", [*IN_CONFIGURATION, *BEFORE])
def test_it_is_refused_before_it_starts(
    case: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arch, arguments, words = {**CASES, **BEFORE}[case]
    transfer = transfer_config(
        place_of(tmp_path), index_url=None, reuse=ReuseOptions(), request_namespace=True
    )
    engine_args = {**ENGINE_ARGS, **arguments}
    config, obstacle = resolve(engine_arguments(str(tiny_model(arch)), engine_args), transfer)
    assert obstacle is not None
    assert words in obstacle
    assert config.kv_transfer_config is None
    assert caplog.text.count(NOTICE) == 1
    assert obstacle in caplog.text


def test_data_parallel_without_experts_is_served(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    transfer = transfer_config(
        place_of(tmp_path), index_url=None, reuse=ReuseOptions(), request_namespace=True
    )
    arguments = {**ENGINE_ARGS, **BEFORE["experts over data parallel ranks"][1]}
    _, obstacle = resolve(engine_arguments(str(tiny_model("qwen3")), arguments), transfer)
    assert obstacle is None
