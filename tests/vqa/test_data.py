"""GQA's files are read, what is wrong with them is told, and the made-up sets are in their format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import PerceptualHash
from workbench.vqa.data import make_shapes, make_video, other_images, read_gqa

ENTRY = {"imageId": "1", "question": "Is it red?", "answer": "yes"}


def written(folder: Path, entries: Any) -> tuple[Path, Path]:
    """A questions' file, and a folder with the images 1.jpg and 2.png."""
    images = folder / "images"
    images.mkdir()
    Image.new("RGB", (8, 8), "red").save(images / "1.jpg")
    Image.new("RGBA", (8, 8), "blue").save(images / "2.png")
    questions = folder / "questions.json"
    questions.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return questions, images


def test_questions_in_gqas_format(tmp_path: Path) -> None:
    entries = {
        "02930152": {
            **ENTRY,
            "semantic": [{"operation": "select", "dependencies": []}],
            "types": {"detailed": "verifyColor"},
            "isBalanced": True,
        },
        "7": {"imageId": 2, "question": "What is it?"},  # a test set tells no answers
    }
    questions, images = written(tmp_path, entries)
    one, two = read_gqa(questions, images)
    assert (one.id, one.image, one.question, one.truth) == (
        "02930152",
        images / "1.jpg",
        "Is it red?",
        "yes",
    )
    assert (two.id, two.image, two.truth) == ("7", images / "2.png", None)
    assert read_gqa(questions, images, limit=1) == [one]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("{", "cannot be read as JSON"),
        ([ENTRY], "GQA's format is an object"),
        ({}, "GQA's format is an object"),
        ({"7": "Is it red?"}, "question 7: not an object"),
        ({"7": {"question": "Is it red?"}}, 'question 7: "imageId" is None'),
        ({"7": {**ENTRY, "imageId": True}}, '"imageId" is True'),
        ({"7": {**ENTRY, "imageId": "../images/1"}}, "is a path"),
        ({"7": {**ENTRY, "imageId": "3"}}, "there is no image 3 (.jpg, .jpeg, .png)"),
        ({"7": {**ENTRY, "question": " "}}, 'question 7: "question"'),
        ({"7": {**ENTRY, "answer": ["yes"]}}, 'question 7: "answer"'),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, entries: Any, words: str) -> None:
    questions, images = written(tmp_path, entries)
    with pytest.raises(OptionError) as error:
        read_gqa(questions, images)
    assert words in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    questions, images = written(tmp_path, {"7": ENTRY})
    with pytest.raises(OptionError, match=r"no-such\.json"):
        read_gqa(tmp_path / "no-such.json", images)
    with pytest.raises(OptionError, match="is no folder"):
        read_gqa(questions, tmp_path / "no-such")
    whole = (images / "1.jpg").read_bytes()
    (images / "1.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OptionError, match=r"1\.jpg cannot be read"):
        read_gqa(questions, images)


def test_shapes_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    made = [make_shapes(tmp_path / name, 6, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    texts = [questions.read_text() for questions, _ in made]
    assert texts[0] == texts[1] != texts[2]
    first, second = (sorted(images.iterdir()) for _, images in made[:2])
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    samples = read_gqa(*made[0])
    assert len(samples) == 24
    assert len({sample.image for sample in samples}) == 6
    again = [sample for sample in samples if sample.id.endswith("-again")]
    plain = {sample.id: sample for sample in samples}
    for sample in again:
        asked = plain[sample.id.replace("-again", "-colour")].question
        assert sample.question != asked
        assert sample.question.strip().casefold() == asked.casefold()


def test_answers_are_what_is_drawn(tmp_path: Path) -> None:
    from workbench.vqa.data import COLOURS

    for sample in read_gqa(*make_shapes(tmp_path, 10)):
        if not sample.id.endswith("-colour"):
            continue
        with Image.open(sample.image) as image:
            seen = {color for _, color in image.getcolors(1 << 16) or ()}
        assert sample.truth is not None
        assert COLOURS[sample.truth] in seen


@pytest.mark.slow
def test_frames_drift(tmp_path: Path) -> None:
    """Neighbours are near-duplicates, no two are equal, and the last is unlike the first."""
    samples = read_gqa(*make_video(tmp_path, 60))
    images = []
    for sample in samples:
        with Image.open(sample.image) as image:
            images.append(image.copy())
    assert len({image.tobytes() for image in images}) == 60
    vectors = PerceptualHash().encode(images)
    neighbours = np.einsum("ij,ij->i", vectors[:-1], vectors[1:])
    assert neighbours.min() >= 0.8
    assert vectors[0] @ vectors[-1] < 0.7


def test_the_control_shows_another_image(tmp_path: Path) -> None:
    samples = read_gqa(*make_shapes(tmp_path, 3))
    others = list(other_images(samples, 5))
    assert len(others) == 5
    for sample, other in zip(samples, others, strict=False):
        assert other.image != sample.image
        assert (other.id, other.question, other.truth) == (sample.id, sample.question, None)
    assert list(other_images(samples[:4], 4)) == [], "one image alone"
