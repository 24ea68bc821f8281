"""The benchmark's passes, each in a process of its own, on a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.settings import ENGINE_ARGS
from workbench.vqa.data import make_shapes, other_images, read_gqa
from workbench.vqa.passes import Facts, Pass, Row, run
from workbench.vqa.report import agreement, figures_of

IMAGES = 3
PREFIX = "who owns this harbour where does that river end "


def told(work: Pass) -> tuple[list[Row], Facts]:
    *rows, facts = run(work)
    assert isinstance(facts, Facts)
    return [row for row in rows if isinstance(row, Row)], facts


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_images_that_were_seen_in_another_process(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The vision tower runs once for each image, and never again; answers are plain vLLM's."""
    samples = read_gqa(*make_shapes(tmp_path / "data", IMAGES))
    prefixed = [replace(sample, prefix=PREFIX) for sample in samples]
    others = list(other_images(samples, len(samples)))
    plain = Pass(
        name="plain",
        model=str(tiny_model("idefics3")),
        engine_args=ENGINE_ARGS,
        samples=(*samples, *prefixed, *others),
        max_tokens=4,
        template="<image>{question}",
    )
    rows, facts = told(plain)
    assert facts.tower
    references = rows[: 2 * len(samples)]
    assert sum(row.tower_calls for row in rows) >= IMAGES
    changed = [
        not agreement(one, other).same
        for one, other in zip(rows, rows[2 * len(samples) :], strict=False)
    ]
    assert sum(changed) > len(samples) / 2, "the model does not look at its images"

    tiered = replace(
        plain,
        name="cold",
        samples=tuple(samples),
        store=tmp_path / "store",
        prompt_cache=PromptCacheOptions(),
        encoders={"vision": "phash"},
    )
    cold, facts = told(tiered)
    assert sum(row.tower_calls for row in cold) == IMAGES
    assert sum(row.report["images_computed"] for row in cold) == IMAGES
    assert facts.stored_images == IMAGES
    assert facts.stored_prompts >= IMAGES

    again, _ = told(replace(tiered, name="warm", samples=(*samples, *prefixed)))
    assert [row.tower_calls for row in again] == [0] * len(again)
    warm, prefix = again[: len(samples)], again[len(samples) :]
    assert all(row.report["kv_cache"] == "hit" for row in warm)
    assert sum(row.report["images_loaded"] for row in warm) == 0, "KV covers the images"
    assert sum(row.report["images_loaded"] for row in prefix) == IMAGES
    uncached = [*references[: len(samples)], *references]
    for row, reference in zip([*cold, *again], uncached, strict=True):
        found = agreement(reference, row)
        assert found.same and found.difference < 1e-4, row.id
    figures = figures_of(prefixed, prefix, references[len(samples) :], facts)
    assert figures["tiers"]["fusion"]["hit"] == IMAGES
    assert figures["answers_same"] == len(samples)


@pytest.mark.soak
@pytest.mark.engine
def test_a_model_that_takes_no_images(reader: Path, tmp_path: Path) -> None:
    samples = read_gqa(*make_shapes(tmp_path, 1))
    work = Pass("plain", str(reader), ENGINE_ARGS, tuple(samples), 4, template="{question}")
    with pytest.raises(OptionError, match="takes no images"):
        list(run(work))


@pytest.mark.soak
@pytest.mark.engine
def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    from semkv_rag.errors import OptionError

    samples = read_gqa(*make_shapes(tmp_path, 1))
    work = Pass("plain", str(tmp_path / "no-such"), {}, tuple(samples), 4)
    with pytest.raises(OptionError, match="no-such"):
        list(run(work))
