"""Plans: sizes are those of the files that are written, times those that were fitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.planning import (
    Measured,
    ModelShape,
    Timing,
    make_plan,
    model_shape,
    storage_gb_per_s,
    timing_of,
    timing_of_gpu,
)

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
SHAPE = ModelShape("made up", 10, 8, 2, 64, 1_000_000, 2)


def config(folder: Path, values: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def test_a_dense_model(tmp_path: Path) -> None:
    shape = model_shape(config(tmp_path, QWEN3_8B))
    assert shape.kv_bytes_per_token == 147_456
    # 8.19 billion parameters, of which 1.24 billion are two matrices of embeddings.
    assert shape.parameters == pytest.approx(6.95e9, rel=0.01)
    assert model_shape(str(tmp_path), kv_dtype="float32").kv_bytes_per_token == 2 * 147_456


def test_of_a_mixture_the_experts_that_a_token_takes_count(tmp_path: Path) -> None:
    mixture = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "dtype": "float32",
        "sliding_window": None,
    }
    one_expert = 3 * 64 * 128
    attention = 64 * 64 * 2 + 64 * 32 * 2
    gate = 64 * 8
    found = model_shape(config(tmp_path, mixture)).parameters
    assert found == 2 * (attention + gate + 2 * one_expert)


def test_latents_are_stored_once_for_all_heads(tmp_path: Path) -> None:
    values = {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "vocab_size": 102_400,
        "dtype": "bfloat16",
    }
    shape = model_shape(config(tmp_path, values))  # DeepSeek-V2-Lite
    assert shape.kv_bytes_per_token == 27 * (512 + 64) * 2
    assert shape.pair_flops == 27 * 16 * 2 * (192 + 128)
    # 2.4 billion are active, of which 0.4 billion are embeddings.
    assert shape.parameters == pytest.approx(2.2e9, rel=0.1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"layer_types": ["full_attention"] * 35 + ["linear_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "sparse multi-head latent attention"),
    ],
)
def test_other_kinds_of_kv_are_refused(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError, match=reason):
        model_shape(config(tmp_path, {**QWEN3_8B, **changed}))


@pytest.mark.parametrize(
    ("changed", "windowed"),
    [
        ({"model_type": "mistral"}, 36),
        ({"use_sliding_window": True, "max_window_layers": 12}, 24),
        ({"use_sliding_window": False}, 0),
    ],
)
def test_a_layer_with_a_window_keeps_all_kv_and_looks_at_its_window(
    tmp_path: Path, changed: dict[str, Any], windowed: int
) -> None:
    shape = model_shape(config(tmp_path, {**QWEN3_8B, "sliding_window": 4096, **changed}))
    assert shape.windowed == windowed
    assert shape.kv_bytes_per_token == 147_456
    pair = 4 * 32 * 128
    assert shape.pair_flops == (36 - windowed) * pair
    assert shape.token_flops == 2 * shape.parameters + windowed * 4096 * pair


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no config that can be read"):
        model_shape(str(tmp_path))


def test_a_timing_goes_through_measurements_that_follow_it() -> None:
    true = Timing(0.5, 0.001, cost=1.3, fixed_ms=80)
    lengths = (1000, 2000, 4000)
    measured = [
        Measured(n, true.prefill_ms(n), true.blend_ms(n, 0.2, 0.0), 0.0, 0.2) for n in lengths
    ]
    found = timing_of(measured, 1000)
    assert found.token_ms == pytest.approx(0.5)
    assert found.pair_ms == pytest.approx(0.001)
    assert found.cost == pytest.approx(1.3)
    assert found.fixed_ms == pytest.approx(80)
    assert found.load_gb_per_s is None


def test_noise_makes_no_time_negative() -> None:
    # Less than linear: attention would cost less than nothing.
    measured = [Measured(n, n**0.9, n**0.9 * 0.3, 10.0, 0.2) for n in (1000, 2000, 4000)]
    found = timing_of(measured, 1000)
    assert found.pair_ms == 0
    assert found.token_ms > 0
    assert min(found.cost, found.fixed_ms) >= 0


def test_one_length_is_not_enough() -> None:
    with pytest.raises(OptionError, match="two lengths"):
        timing_of([Measured(1000, 100.0, 20.0, 1.0, 0.2)] * 2, 1000)


def test_loading_and_computing_go_on_beside_each_other() -> None:
    timing = Timing(0.5, 0.0, cost=1.0, fixed_ms=0.0)
    assert timing.blend_ms(1000, 0.2, load_ms=40.0) == pytest.approx(100.0)
    assert timing.blend_ms(1000, 0.2, load_ms=400.0) == pytest.approx(400.0)


def test_what_is_stored() -> None:
    plan = make_plan(
        SHAPE, Timing(0.5, 0.0), machine="m", storage_gb_per_s=1.0, corpus_tokens=1_000_000
    )
    assert plan.kv_bytes_per_token == 2 * 10 * 2 * 64 * 2
    assert plan.stored_bytes_per_token == 2 * 5120 + 10
    assert plan.store_bytes == 1_000_000 * (2 * 5120 + 10)
    alone = make_plan(
        SHAPE, Timing(0.5, 0.0), machine="m", storage_gb_per_s=1.0, contexts=1, stored_share=0.5
    )
    assert alone.stored_bytes_per_token == 2560
    assert alone.store_bytes is alone.precompute_hours is None


def test_storing_takes_what_was_measured() -> None:
    timing = Timing(0.5, 0.0, stored_tokens_per_s=1000.0)
    plan = make_plan(
        SHAPE, timing, machine="m", storage_gb_per_s=1.0, corpus_tokens=3_600_000, contexts=2
    )
    assert plan.precompute_hours == pytest.approx(2.0)


def test_break_even() -> None:
    timing = Timing(0.5, 0.0, cost=1.0, fixed_ms=0.0)
    (first,) = make_plan(SHAPE, timing, machine="m", storage_gb_per_s=1.0, prompts=(1000,)).prompts
    slowest = make_plan(
        SHAPE,
        timing,
        machine="m",
        storage_gb_per_s=first.break_even_gb_per_s,
        prompts=(1000,),
    ).prompts[0]
    assert slowest.load_ms == pytest.approx(slowest.plain_ms)
    assert slowest.presets["balanced"].speedup == pytest.approx(1.0)
    assert first.presets["fast"].speedup > first.presets["balanced"].speedup > 1.0


def test_advice() -> None:
    def advice(timing: Timing, rate: float) -> str:
        return " ".join(
            make_plan(SHAPE, timing, machine="m", storage_gb_per_s=rate, prompts=(1000,)).advice
        )

    slow = Timing(0.5, 0.0, measured=True)
    assert advice(slow, 100.0) == ""
    assert "as long as prefill" in advice(slow, 0.001)
    assert "does not pay" in advice(slow, 0.001)
    assert "storage: 0.02 GB/s" in advice(slow, 0.02)
    assert "the way into the cache" in advice(replace(slow, load_gb_per_s=0.02), 5.0)
    assert "--measure" in advice(Timing(0.5, 0.0), 100.0)


def test_a_gpu_by_its_data_sheet() -> None:
    timing = timing_of_gpu(SHAPE, "h100")
    assert timing.token_ms == pytest.approx(2 * 1_000_000 / (989e12 * 0.5) * 1000)
    with pytest.raises(OptionError, match="H100"):
        timing_of_gpu(SHAPE, "TPU")


def test_storage_by_name_or_by_number() -> None:
    assert storage_gb_per_s("nvme") == 7.0
    assert storage_gb_per_s("3.5") == 3.5
    for wrong in ("tape", "0", "nan", "-1"):
        with pytest.raises(OptionError, match="nvme"):
            storage_gb_per_s(wrong)


@pytest.mark.parametrize("wrong", [{"prompts": (32,)}, {"prompts": ()}, {"corpus_tokens": 0}])
def test_what_cannot_be_planned(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="can"):
        make_plan(SHAPE, Timing(0.5, 0.0), machine="m", storage_gb_per_s=1.0, **wrong)
