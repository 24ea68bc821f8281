"""Questions about images: GQA's files, and two made-up sets in the same format.

GQA's question files are one JSON object, `{"<question id>": {"imageId": "…", "question": "…",
"answer": "…", …}, …}`, beside a folder of images that are named by their `imageId`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from semkv_rag.errors import OptionError

SUFFIXES = (".jpg", ".jpeg", ".png")
SIZE = 224  # pixels of a made-up image, both ways
EDGE = 30  # from a shape's middle to its edge, pixels
COLOURS = {
    "red": (214, 40, 40),
    "green": (43, 147, 72),
    "blue": (29, 78, 216),
    "yellow": (250, 204, 21),
    "purple": (124, 58, 177),
    "orange": (247, 127, 0),
}
BACKGROUNDS = ((240, 240, 235), (60, 64, 72), (205, 225, 240), (225, 205, 180), (150, 155, 150))
KINDS = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Sample:
    """A question about an image.

    Attributes:
        truth: the right answer, or None where it is not told.
        prefix: text that stands before the image.
    """

    id: str
    image: Path
    question: str
    truth: str | None
    prefix: str = ""


def read_gqa(questions: Path, images: Path, limit: int | None = None) -> list[Sample]:
    """The questions of a file in GQA's format, in its order. Further fields are passed over.

    Args:
        images: the folder; the image of `imageId` is `<imageId>.jpg`, `.jpeg` or `.png` in it.
        limit: no more than this many.

    Raises:
        OptionError: a file or an image is missing or cannot be read, or is not of this format.
    """
    if not images.is_dir():
        raise OptionError(f"{images} is no folder: give the folder of the images")
    try:
        entries = json.loads(questions.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{questions} cannot be read as JSON: {error}") from error
    if not isinstance(entries, dict) or not entries:
        raise OptionError(f'{questions}: GQA\'s format is an object, {{"<question id>": {{…}}, …}}')
    chosen = list(entries.items())[:limit]
    samples = [_sample(questions, images, id_, entry) for id_, entry in chosen]
    for path in dict.fromkeys(sample.image for sample in samples):
        try:
            with Image.open(path) as image:
                image.load()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise OptionError(f"the image {path} cannot be read: {error}") from error
    return samples


def _sample(questions: Path, images: Path, id_: str, entry: Any) -> Sample:
    if not isinstance(entry, dict):
        raise OptionError(f"{questions}, question {id_}: not an object")
    name, question, truth = (entry.get(key) for key in ("imageId", "question", "answer"))
    if not isinstance(name, str | int) or isinstance(name, bool) or not str(name):
        raise OptionError(f'{questions}, question {id_}: "imageId" is {name!r}, not a name')
    if not isinstance(question, str) or not question.strip():
        raise OptionError(f'{questions}, question {id_}: "question" is {question!r}, not a text')
    if truth is not None and not isinstance(truth, str):
        raise OptionError(f'{questions}, question {id_}: "answer" is {truth!r}, not a text')
    if Path(str(name)).name != str(name):
        raise OptionError(f'{questions}, question {id_}: "imageId" {name!r} is a path, not a name')
    paths = [images / f"{name}{suffix}" for suffix in SUFFIXES]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        endings = ", ".join(SUFFIXES)
        raise OptionError(
            f"{questions}, question {id_}: there is no image {name} ({endings}) in {images}"
        )
    return Sample(str(id_), found, question, truth)


# ---- made-up sets --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    kind: str
    colour: str
    x: float
    y: float

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        x, y, fill = self.x, self.y, COLOURS[self.colour]
        if self.kind == "circle":
            draw.ellipse((x - EDGE, y - EDGE, x + EDGE, y + EDGE), fill=fill)
        elif self.kind == "square":
            draw.rectangle((x - EDGE, y - EDGE, x + EDGE, y + EDGE), fill=fill)
        else:
            draw.polygon(((x, y - EDGE), (x - EDGE, y + EDGE), (x + EDGE, y + EDGE)), fill=fill)


def make_shapes(folder: Path, images: int, seed: int = 0) -> tuple[Path, Path]:
    """Coloured shapes on backgrounds, four questions about each, one of them twice.

    The second time it has other case and white space, which the exact tier does not tell apart.

    Returns:
        The questions' file and the images' folder.
    """
    rng = random.Random(seed)
    entries: dict[str, Any] = {}
    for number in range(images):
        shapes = _scene(rng)
        name = f"shapes-{number:04}"
        _save(folder, name, _painted(rng.choice(BACKGROUNDS), shapes))
        asked = rng.choice(shapes)
        count = str(len(shapes))
        right = max(shapes, key=lambda shape: shape.x).kind
        colour = f"What colour is the {asked.kind}?"
        for what, question, answer in (
            ("colour", colour, asked.colour),
            ("count", "How many shapes are there?", count),
            ("right", "Which shape is on the right?", right),
            ("again", f"  {colour.upper()} ", asked.colour),
        ):
            entries[f"{name}-{what}"] = _entry(name, question, answer)
    return _questions(folder, entries), folder / "images"


def make_video(folder: Path, frames: int, seed: int = 0) -> tuple[Path, Path]:
    """Frames of a video in which three shapes drift slowly, one question about each frame.

    From frame to frame a shape moves by about half a pixel, the light changes a little, and each frame
    has noise of its own: no two frames are equal.

    Returns:
        The questions' file and the images' folder.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    colours = rng.sample(sorted(COLOURS), len(KINDS))
    starts = [(EDGE + 26 + 52 * place, 60 + 45 * place) for place in range(len(KINDS))]
    courses = [rng.uniform(0, 2 * math.pi) for _ in KINDS]
    entries: dict[str, Any] = {}
    for frame in range(frames):
        shapes = [
            _Shape(
                kind,
                colour,
                x + 25 * (math.sin(frame / 50 + course) - math.sin(course)),
                y + 12 * math.sin(frame / 40 + course),
            )
            for kind, colour, (x, y), course in zip(KINDS, colours, starts, courses, strict=True)
        ]
        light = 1 + 0.1 * math.sin(frame / 30)
        pixels = np.asarray(_painted(BACKGROUNDS[-1], shapes), dtype=np.float64) * light
        pixels += noise.normal(0, 2, pixels.shape)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        name = f"frame-{frame:04}"
        _save(folder, name, image)
        asked = shapes[frame % len(shapes)]
        left = min(shapes, key=lambda shape: shape.x).kind
        question, answer = (
            (f"What colour is the {asked.kind}?", asked.colour),
            ("Which shape is on the left?", left),
            ("How many shapes are there?", str(len(shapes))),
        )[frame // len(shapes) % 3]
        entries[name] = _entry(name, question, answer)
    return _questions(folder, entries), folder / "images"


def _scene(rng: random.Random) -> list[_Shape]:
    """Two or three shapes, no two of a kind, none over another."""
    kinds = rng.sample(KINDS, rng.choice((2, 3)))
    columns = rng.sample((45, 112, 179), len(kinds))
    return [
        _Shape(kind, rng.choice(sorted(COLOURS)), x, rng.uniform(45, SIZE - 45))
        for kind, x in zip(kinds, columns, strict=True)
    ]


def _painted(background: tuple[int, int, int], shapes: Sequence[_Shape]) -> Image.Image:
    image = Image.new("RGB", (SIZE, SIZE), background)
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        shape.draw(draw)
    return image


def _entry(image: str, question: str, answer: str) -> Mapping[str, Any]:
    return {"imageId": image, "question": question, "answer": answer, "isBalanced": True}


def _save(folder: Path, name: str, image: Image.Image) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    image.save(folder / "images" / f"{name}.png")


def _questions(folder: Path, entries: Mapping[str, Any]) -> Path:
    path = folder / "questions.json"
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return path


def other_images(samples: Sequence[Sample], count: int) -> Iterator[Sample]:
    """The first `count` questions, each about the next sample's image that is another one."""
    for place, sample in enumerate(samples[:count]):
        following = (*samples[place + 1 :], *samples[:place])
        other = next((one.image for one in following if one.image != sample.image), None)
        if other is not None:
            yield replace(sample, image=other, truth=None)
