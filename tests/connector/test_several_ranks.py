"""Several ranks, each with its own files, answer as one does: each has its own heads (of latents all), or
its own layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.connector.messages import REFUSED_ON_ANOTHER_RANK, GateReport, of_all_ranks
from semkv_rag.engine import Completion, Engine
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines, own_on_ranks
from workbench.inside import in_each, last_picked
from workbench.tiny_models import LATENT

OPTIONS: list[dict[str, Any]] = [
    {"ratio": 0.0},
    {"ratio": 0.3},
    {"ratio": 1.0},
    {"ratio": 0.4, "selector": "kv_deviation"},
    {"ratio": 0.4, "selector": "kv_deviation", "check_layer": 3},
    {"ratio": 0.2, "selector": "query_attention"},
    {"ratio": 0.2, "selector": "deviation_x_attention"},
]


def store_weighed(engine: Engine, tokens: list[list[int]]) -> None:
    """Chunks with how much each of their tokens depends on what stands before it."""
    contexts = random_tokens(50, 30), random_tokens(51, 30)
    store_chunks(engine, tokens, namespace="weighed", context=contexts[0], reference=contexts[1])


def begin_fails_once(engine: Engine, rank: int) -> None:
    """On one rank; the blend after it begins as ever."""

    def break_(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        blend_pass = get_kv_transfer_group().executor._blend_pass

        def begin(task: Any, sources: Any) -> Any:
            del blend_pass.begin
            raise MemoryError("none left")

        if worker.rank == rank:
            blend_pass.begin = begin

    in_each(engine, break_)


def gates_refuse(engine: Engine) -> list[str | None]:
    """Why the gate refuses on each rank, where the second cannot see a layer's keys."""

    def run(worker: Any) -> str | None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from semkv_rag.connector.worker.gate import run_gate

        blend_pass = get_kv_transfer_group().executor._blend_pass
        tap = blend_pass.setting.model.tap
        impl = tap._layers[-1].attention.impl
        tapped = impl.do_kv_cache_update
        if worker.rank == 1:
            impl.do_kv_cache_update = tap._update[-1]
        try:
            return run_gate(
                blend_pass,
                vocabulary=480,
                block_size=blend_pass.setting.model.paged.block_size,
                blocks=9,
                dtype=worker.model_runner.dtype,
            ).reason
        finally:
            impl.do_kv_cache_update = tapped

    return in_each(engine, run)


def computed(answer: Completion) -> set[int]:
    assert answer.report.token_map is not None
    runs = [run for span in answer.report.token_map.spans for run in span.recomputed]
    return {token for begin, end in runs for token in range(begin, end)}


WEIGHED: list[dict[str, Any]] = [{"ratio": step / 20, "token_map": True} for step in range(2, 12)]
"""By attention and by what each rank has stored of its own heads."""

WAYS = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}

IN_SOAK = ("deepseek_v2", "gemma3_sliding", "gpt_oss", "mistral_sliding", "paddleocr_vl")


CASES = [
    ("qwen3", "tensor parallel"),
    ("qwen3", "pipeline"),
    pytest.param("qwen3", "both", marks=pytest.mark.soak),
    *(pytest.param(arch, "tensor parallel", marks=pytest.mark.soak) for arch in IN_SOAK),
    # vLLM has no pipeline for PaddleOCR-VL.
    *(pytest.param(arch, "pipeline", marks=pytest.mark.soak) for arch in IN_SOAK[:-1]),
]


@pytest.mark.parametrize(("arch", "way"), CASES)
def test_several_ranks_answer_as_one(
    arch: str,
    way: str,
    engines: Engines,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(arch)
    tokens = [random_tokens(seed, 60 + seed) for seed in range(3)]
    prompt = [*random_tokens(99, 16), *tokens[2], *tokens[0], *random_tokens(77, 16)]

    with engines.own(model) as one:
        store_chunks(one, tokens, namespace="default")
        store_weighed(one, tokens)
        expected = [blended(one, prompt, **options) for options in OPTIONS]
        weighed = [blended(one, prompt, namespace="weighed", **options) for options in WEIGHED]
        fingerprint, kv_bytes_per_token = one.fingerprint, one.kv_bytes_per_token

    sizes = WAYS[way]
    if arch == "qwen3" and "pipeline_parallel_size" in sizes:  # others' stages are of equal length
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    store = tmp_path / "several"
    with own_on_ranks(engines, model, sizes, store=store) as several:
        assert several.gate.servable, several.gate.reason
        assert several.fingerprint != fingerprint
        copies = 2 if arch in LATENT and way == "tensor parallel" else 1
        assert several.kv_bytes_per_token == copies * kv_bytes_per_token
        stored = store_chunks(several, tokens, namespace="default")
        for options, answer in zip(OPTIONS, expected, strict=True):
            got = blended(several, prompt, **options)
            assert_same(got, answer)
            assert got.report.recomputed_tokens == answer.report.recomputed_tokens
            assert got.report.file_bytes == copies * answer.report.file_bytes
        assert_same(blended(several, prompt, ratio=1.0), plain(several, prompt))

        store_weighed(several, tokens)
        compared = 0
        for options, answer in zip(WEIGHED, weighed, strict=True):
            got = blended(several, prompt, namespace="weighed", **options)
            first_rank, *others = last_picked(several)
            assert others == [first_rank] * (math.prod(sizes.values()) - 1)
            # What is stored is rounded on each rank, so a token at the margin may be another one. The
            # risk is then another one, too: the more is computed, the more a single token tells.
            alike = len(computed(got) & computed(answer)) / len(computed(answer))
            assert alike > 0.9
            if alike == 1:
                compared += 1
                # The report has five digits.
                assert got.report.risk == pytest.approx(answer.report.risk, rel=0.02, abs=1.1e-5)
        assert compared >= 2

        # A file that one rank cannot read: all ranks compute, and the answer is plain vLLM's.
        for rank, chunk in ((1, stored[0]), (0, stored[2])):
            files = sorted(store.rglob(f"*{chunk.id}*"))
            assert len(files) == math.prod(sizes.values()), files
            files[rank].write_bytes(files[rank].read_bytes()[:-9])
            several.reset_prefix_cache()
            torn = blended(several, prompt, ratio=0.5)
            assert torn.report.reused_tokens == 0
            assert torn.report.reason is not None
            assert "torn" in torn.report.reason, "it is the rank's that found it"
            assert_same(torn, plain(several, prompt))

        # A blend that one rank cannot begin: all compute, and the next one is blended again.
        for rank in (0, 1):
            begin_fails_once(several, rank)
            several.reset_prefix_cache()
            without = blended(several, prompt, namespace="weighed", ratio=0.5)
            assert without.report.reused_tokens == 0
            assert without.report.reason == "the blend failed: MemoryError('none left')"
            assert_same(without, plain(several, prompt))
            several.reset_prefix_cache()
            assert blended(several, prompt, namespace="weighed", ratio=0.5).report.reused_tokens > 0

        # A layer whose keys the second rank cannot see: the gate refuses on both, and neither waits.
        reasons = gates_refuse(several)
        knowing = reasons.pop(1)
        assert knowing is not None
        assert "it writes KV itself" in knowing
        assert set(reasons) == {REFUSED_ON_ANOTHER_RANK}
        gates = [GateReport(False, reason) for reason in (*reasons, knowing)]
        assert of_all_ranks(gates).reason == knowing
