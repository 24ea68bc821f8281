"""What the VQA benchmark says of answers and passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from semkv_rag.prompt_cache import PromptCacheOptions
from semkv_rag.report import ReuseReport
from workbench.vqa.command import main, parser, settings
from workbench.vqa.data import Sample
from workbench.vqa.passes import Facts, Row
from workbench.vqa.report import agreement, figures_of, is_true, line, reaction, table

SAMPLE = Sample("7", Path("1.jpg"), "Is it red?", "yes")
PLAIN = Row("7", "Yes.", (1, 2), ({1: -0.5, 3: -1.0}, {2: -0.1}), 0.2, 0.1, 1, {})
PLAIN = replace(PLAIN, report=ReuseReport(kv_cache="skip", prompt_tokens=50).to_mapping())
HIT = replace(
    PLAIN,
    latency_s=0.032,
    tower_calls=0,
    report=ReuseReport(
        kv_cache="hit",
        prompt_tokens=50,
        exact_tokens=49,
        tiers={"exact_text": "hit", "semantic_text": "skip", "embedding:vision": "skip"},
        served_by="exact_text",
    ).to_mapping(),
)
MISS = replace(
    PLAIN,
    tokens=(1, 4),
    logprobs=({1: -0.7, 3: -1.0}, {4: -0.1, 2: -9.0}),
    report=ReuseReport(
        prompt_tokens=50,
        images_computed=1,
        tiers={"exact_text": "miss", "semantic_text": "miss", "embedding:vision": "miss"},
    ).to_mapping(),
)


def test_agreement() -> None:
    assert agreement(PLAIN, HIT) == agreement(HIT, PLAIN)
    assert (agreement(PLAIN, HIT).same, agreement(PLAIN, HIT).difference) == (True, 0)
    found = agreement(PLAIN, MISS)
    assert not found.same
    assert found.difference == pytest.approx(8.9)
    # Behind the first other token nothing is compared.
    parted = replace(MISS, tokens=(3, 2))
    assert agreement(PLAIN, parted).difference == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [("Yes.", "yes", True), (" a  Red car", "a red car", True), ("no", "yes", False)],
)
def test_the_ground_truth(text: str, truth: str, right: bool) -> None:
    assert is_true(text, truth) is right


def test_a_line_tells_both_matches() -> None:
    assert line(SAMPLE, HIT, PLAIN) == (
        "[7] hit (text:exact) | latency=0.032s | exact_text=hit, semantic_text=skip,"
        " embedding:vision=skip, kv_cache=hit | tokens_reused=49 | tower_calls=0"
        " | answer match=yes | ground truth match=yes"
    )
    told = line(replace(SAMPLE, truth="no"), MISS, PLAIN)
    assert told.endswith("| tower_calls=1 | answer match=no | ground truth match=no")
    assert "ground truth" not in line(replace(SAMPLE, truth=None), HIT, PLAIN)
    assert line(SAMPLE, PLAIN, None) == (
        "[7] plain vLLM | latency=0.200s | tower_calls=1 | ground truth match=yes"
    )


def test_figures_by_tier() -> None:
    samples = [replace(SAMPLE, id=str(number)) for number in range(3)]
    facts = Facts("Llava", "vision_tower", stored_prompts=2, prompts_bytes=10)
    found = figures_of(samples, [HIT, MISS, MISS], [PLAIN] * 3, facts)
    assert (found["requests"], found["tower_calls"], found["answers_same"]) == (3, 2, 1)
    exact = found["tiers"]["exact_text"]
    assert (exact["hit"], exact["miss"], exact["skip"]) == (1, 2, 0)
    assert exact["of_its_hits"]["answers_same"] == 1
    assert exact["of_its_hits"]["latency_s"] == {"median": 0.032, "min": 0.032, "max": 0.032}
    assert found["tiers"]["embedding:vision"]["of_its_hits"]["requests"] == 0
    assert found["no_hit"]["requests"] == found["no_hit"]["tower_calls"] == 2
    assert found["store"]["stored_prompts"] == 2
    told = table("warm", found)
    assert "exact_text" in told and "1/2/0" in told and "0.032 (0.032 to 0.032)" in told
    assert "right by the ground truth: 3 of 3" in told
    plain = figures_of(samples, [PLAIN] * 3, None, facts)
    assert plain["tiers"] == {} and "answers_same" not in plain
    table("plain", plain)


def test_the_control() -> None:
    assert reaction([(PLAIN, MISS), (PLAIN, HIT)])["answers_changed"] == 1
    assert reaction([])["questions"] == 0


def test_passes() -> None:
    tiers = PromptCacheOptions(near_images=True, thresholds={"vision": 0.9})
    names = [setting.name for setting in settings(parser().parse_args([]), tiers)]
    assert names == ["cold", "warm", "prefix"]
    video = settings(parser().parse_args(["--video", "--thresholds", "0.8,1"]), tiers)
    assert [(one.name, one.tiers and one.tiers.near_images) for one in video] == [
        ("near off", False),
        ("near off, warm", False),
        ("near 0.8", True),
        ("near 1", True),
    ]
    assert video[0].store == video[1].store != video[2].store != video[3].store
    assert [one.tiers.threshold_of("vision") for one in video if one.tiers] == [0.9, 0.9, 0.8, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--questions", "q.json"], "belong together"),
        (["--limit", "0"], "--limit 0"),
        (["--prompt-cache", '{"near": 1}'], "unknown"),
        (["--prompt-cache", "[]"], "write a JSON object"),
        (["--tier-encoder", "phash"], "LAYER=NAME"),
        (["--video", "--tier-encoder", "semantic=minilm"], "wants a layer `vision`"),
        (["--video", "--thresholds", "high"], "write numbers"),
        (["--video", "--thresholds", "2"], "from -1 to 1"),
        (["--engine-arg", "dtype"], "NAME=VALUE"),
        (["--store", "."], "is not empty"),
        (["--prompt-template", "<image>"], "{question}"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["vqa.py", "--shapes", "1", "--frames", "1", *options])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert words in str(exit_.value)
