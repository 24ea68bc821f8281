"""`semkv doctor --deep`: a sound engine passes, and what is broken in it is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from semkv_rag.cli.deep import equality
from semkv_rag.cli.deep.equality import TOLERANCES, check_equality
from semkv_rag.cli.deep.inside import RUNS, check_attention, check_copying, check_layout
from semkv_rag.cli.deep.prompts import Stored, largest_difference, store_prompt
from semkv_rag.cli.deep.prompts import plain as plain_of_doctor
from semkv_rag.cli.deep.run import _guarded
from semkv_rag.cli.deep.table import in_words_of
from semkv_rag.config import ReuseOptions
from semkv_rag.connector.worker.attention_check import dense, scattered
from semkv_rag.engine import Completion, Engine
from tests.cli.conftest import Semkv
from workbench.answers import plain
from workbench.chunks import random_tokens
from workbench.engines import Engines
from workbench.inside import inside

LIMIT = 1536
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": LIMIT,
    "kv_cache_memory_bytes": 128 << 20,
    "block_size": 32,
}


@pytest.mark.engine
def test_a_sound_engine(semkv: Semkv, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    engine_args = [f"--engine-arg={name}={value}" for name, value in ARGUMENTS.items()]
    out = tmp_path / "found.json"
    outcome = semkv("doctor", "--deep", "--model", tiny_model("qwen3"), *engine_args, "--out", out)
    assert outcome.code == 0, outcome.out + outcome.err
    found = json.loads(out.read_text())
    assert {one["status"] for one in found["findings"]} <= {"ok", "warn"}
    deep = found["deep"]
    assert deep["about"]["dtype"] == "float32"
    status = {(one["check"], one["case"]): one["status"] for one in deep["results"]}
    for runs in ("1 run", "10 runs", "100 runs", "500 runs"):
        assert status["attention", runs] == "ok"
    assert status["attention", "2,000 runs"] == "left out"
    assert status["layout", "4 layers"] == status["copies", "64 blocks"] == "ok"
    for check in ("ratio 1.0", "stall", "neighbours"):
        assert status[check, "1,000 tokens"] == "ok"
        assert status[check, "4,000 tokens"] == status[check, "8,000 tokens"] == "left out"
    assert status["ttft", "1,000 tokens"] in ("ok", "warn")  # no test is about time
    (timed,) = (one for one in deep["results"] if one["check"] == "ttft" and one["figures"])
    preset = ReuseOptions.preset("balanced")
    assert timed["figures"]["charged_ratio"] > preset.ratio_of(1000) + 32 / 1000, "it was asked"
    (equal,) = (one for one in deep["results"] if one["check"] == "ratio 1.0" and one["figures"])
    assert equal["figures"]["reused_tokens"] == 1000 - 16 - 32
    assert "Attention: 500 runs" in outcome.err, "a line for each check, as this is no terminal"
    assert "max_model_len is 1,536" in outcome.out
    assert list(tmp_path.iterdir()) == [out]


def test_options_that_go_together(semkv: Semkv, tmp_path: Path) -> None:
    for arguments, words in (
        (("--deep",), "add --model"),
        (("--no-start",), "add --model"),
        (("--no-start", "--deep", "--model", "m"), "leave --no-start out"),
        (("--out", tmp_path / "x.json"), "add --deep"),
        (("--deep", "--model", "m", "--out", tmp_path / "no" / "x.json"), "make it first"),
    ):
        outcome = semkv("doctor", *arguments)
        assert outcome.code == 2
        assert words in outcome.err


def test_a_model_that_is_not_there(semkv: Semkv, tmp_path: Path) -> None:
    outcome = semkv("doctor", "--deep", "--model", tmp_path / "nowhere", "--json")
    assert outcome.code == 1
    (model,) = (one for one in outcome.data["findings"] if one["check"] == "model")
    assert model["status"] == "fail"
    assert "nowhere" in model["message"]
    assert outcome.data["deep"] is None


@pytest.fixture(scope="module")
def sound(engines: Engines, reader: Path) -> Iterator[Engine]:
    with engines.own(reader) as engine:
        yield engine


def broken(engine: Engine, breaking: Callable[[Any], None], check: Callable[[], Any]) -> Any:
    """What a check finds while something in the worker's process is replaced."""

    def mend(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        model = get_kv_transfer_group().executor._blend_pass.setting.model
        model.attention.__dict__.pop("metadata", None)
        model.tap.__dict__.pop("write", None)

    inside(engine, breaking)
    try:
        return check()
    finally:
        inside(engine, mend)


def test_a_mask_that_ends_a_token_late(sound: Engine) -> None:
    (about,) = sound.probe("about")
    assert check_attention(sound, about, RUNS[2]).status == "ok"

    def late(worker: Any) -> None:
        from dataclasses import replace

        from vllm.distributed.kv_transfer import get_kv_transfer_group

        model = get_kv_transfer_group().executor._blend_pass.setting.model
        metadata = model.attention.metadata

        def one_more(slices: Any) -> Any:
            (here,) = slices
            by_layer, _ = metadata([replace(here, positions=here.positions + 1)])
            slots = model.paged.slots(here.blocks, here.positions)
            return by_layer, dict.fromkeys(by_layer, slots)

        model.attention.metadata = one_more

    found = broken(sound, late, lambda: check_attention(sound, about, RUNS[2]))
    assert found.status == "fail"
    assert "off the dense reference" in found.message
    assert found.fix


def test_a_write_that_goes_elsewhere(sound: Engine) -> None:
    (about,) = sound.probe("about")
    healthy = check_layout(sound, about)
    assert (healthy.status, healthy.figures["largest_error"]) == ("ok", 0)

    def shifted(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        tap = get_kv_transfer_group().executor._blend_pass.setting.model.tap
        write = tap.write
        tap.write = lambda index, keys, values, slots: write(index, keys, values, slots + 1)

    found = broken(sound, shifted, lambda: check_layout(sound, about))
    assert found.status == "fail"
    assert found.figures["blocks_changed"] > 0


def test_a_check_that_fails_in_the_worker(sound: Engine) -> None:
    (about,) = sound.probe("about")

    def overflows(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        def metadata(slices: Any) -> Any:
            raise RuntimeError("the schedule's buffer is too small")

        get_kv_transfer_group().executor._blend_pass.setting.model.attention.metadata = metadata

    look = partial(_guarded, "attention", "100 runs", check_attention, sound, about, 100)
    (found,) = broken(sound, overflows, lambda: list(look()))
    assert found.status == "fail"
    assert "buffer is too small" in found.message
    assert check_attention(sound, about, 100).status == "ok", "the engine goes on"


def test_copies_are_measured(sound: Engine) -> None:
    figures = check_copying(sound).figures
    assert figures["into_cache_bytes_per_s"] > 0
    assert figures["out_of_cache_bytes_per_s"] > 0


def test_answers_that_part(sound: Engine) -> None:
    prompts = [random_tokens(5, 40), random_tokens(6, 40)]
    one, other = (plain(sound, prompt) for prompt in prompts)
    assert largest_difference(one, one) == 0
    assert largest_difference(one, other) > 0.1


@pytest.fixture(scope="module")
def prompt(sound: Engine) -> Stored:
    return store_prompt(sound, seed=1000, length=1000)


def test_a_blend_that_is_wrong(sound: Engine, prompt: Stored) -> None:
    (about,) = sound.probe("about")
    equal = check_equality(sound, about, prompt)
    assert (equal.status, list(equal.figures)) == (
        "ok",
        ["largest_difference_nats", "reused_tokens"],
    )

    def doubled(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        tap = get_kv_transfer_group().executor._blend_pass.setting.model.tap
        write = tap.write
        tap.write = lambda index, keys, values, slots: write(index, keys, 2 * values, slots)

    sound.reset_prefix_cache()
    found = broken(sound, doubled, lambda: check_equality(sound, about, prompt))
    assert found.status == "fail"
    assert found.figures["largest_difference_of_plain_nats"] < 0.001


def test_plain_prefill_that_is_cut_otherwise(
    sound: Engine, prompt: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    (about,) = sound.probe("about")
    answers = []

    def asked(*arguments: Any, **sampling: Any) -> Completion:
        answers.append(plain_of_doctor(*arguments, **sampling))
        return answers[-1]

    monkeypatch.setattr(equality, "plain", asked)
    monkeypatch.setitem(TOLERANCES, "float32", -1.0)  # nothing is within it
    sound.reset_prefix_cache()
    found = check_equality(sound, about, prompt)
    off, own = (found.figures[f"largest_difference{of}_nats"] for of in ("", "_of_plain"))
    assert found.status == ("ok" if off <= 2 * own else "fail")
    cached = [answer.report.cached_tokens for answer in answers]
    assert cached == [0, 0, 96, 0, 384, 0, 800], (
        "whole blocks of its first part were computed before"
    )


def test_probes_leave_answers_alone(sound: Engine) -> None:
    prompt = random_tokens(7, 100)
    before = sound.generate(prompt, sampling={"temperature": 0, "max_tokens": 8})
    sound.probe("attention", 10)
    after = sound.generate(prompt, sampling={"temperature": 0, "max_tokens": 8})
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize(("tokens", "runs"), [(1024, 1), (1024, 512), (1000, 333), (8192, 2000)])
def test_runs_have_room_between_them(tokens: int, runs: int) -> None:
    positions, behind = scattered(tokens, runs, torch.Generator().manual_seed(1))
    assert (positions.diff() > 0).all()
    assert int((positions.diff() > 1).sum()) == runs - 1
    assert not torch.isin(behind, positions).any()
    assert int(behind.max()) < tokens


@pytest.mark.parametrize("window", [None, 1, 20])
def test_the_reference_is_torchs_attention(window: int | None) -> None:
    from types import SimpleNamespace

    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(rows, heads, 8, generator=generator)
        for rows, heads in ((70, 4), (90, 2), (90, 2))
    )
    positions = torch.arange(90)[-70:]
    attention = SimpleNamespace(impl=SimpleNamespace(scale=0.3, logits_soft_cap=None))
    layer: Any = SimpleNamespace(attention=attention, window=window, sinks=None)
    seen = dense(queries, keys, values, positions, layer)
    distance = positions[:, None] - torch.arange(90)
    mask = (distance >= 0) & (distance < (window or 90))
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.repeat_interleave(2, 1).transpose(0, 1),
        values.repeat_interleave(2, 1).transpose(0, 1),
        attn_mask=mask,
        scale=0.3,
    )
    assert torch.allclose(seen, expected.transpose(0, 1), atol=1e-5)


def test_figures_in_words() -> None:
    assert in_words_of("plain_ms", 812.4) == "plain 812 ms"
    assert in_words_of("plain_ms", 12345.6) == "plain 12,346 ms"
    assert in_words_of("into_cache_bytes_per_s", 1.25e9) == "into cache 1.2 GB/s"
    assert in_words_of("blocks_changed", 0) == "blocks changed 0"
    assert in_words_of("largest_difference_nats", 1.2e-7) == "largest difference 1.2e-07 nats"
    assert in_words_of("charged_ratio", None) == "charged ratio unknown"
