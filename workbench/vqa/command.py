"""`benchmarks/vqa.py`: its options, its passes, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from semkv_rag.cli.options import cache_options, engine_args
from semkv_rag.errors import OptionError, SemKVError
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.figures import save, summary
from workbench.vqa.data import Sample, make_shapes, make_video, other_images, read_gqa
from workbench.vqa.passes import QUESTION, Facts, Pass, Row, run
from workbench.vqa.report import (
    VISION,
    draw_passes,
    figures_of,
    line,
    reaction,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
TINY = "llava"
TINY_ARGS: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 256 << 20,
    "seed": 0,
}
ENCODERS = ["semantic=minilm", "vision=phash"]
VIDEO_ENCODERS = ["vision=phash"]  # a text layer takes no donor with another image
PREFIX = "Look at this picture and then answer . "
CONTROL = 100  # questions that are asked about another image too, in the plain pass
THRESHOLDS = "0.8,0.9,0.97"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        description="Questions about images, with and without the tiers"
    )
    found.add_argument("--questions", type=Path, help="GQA's format; made up unless given")
    found.add_argument("--images", type=Path, help="the folder of its images")
    found.add_argument("--limit", type=int, help="no more questions than this")
    found.add_argument("--model", help="folder or hub name; a tiny random one unless given")
    found.add_argument("--prompt-template", help="with {question}; the chat template unless given")
    found.add_argument("--engine-arg", action="append", metavar="NAME=VALUE", help="vLLM's")
    found.add_argument("--max-tokens", type=int, default=8, help="of an answer")
    found.add_argument("--vision-tower", help="its module's name, where it is not found")
    found.add_argument("--store", type=Path, help="a new folder; left behind")
    found.add_argument(
        "--prompt-cache", default="{}", metavar="JSON", help="fields of PromptCacheOptions"
    )
    found.add_argument("--tier-encoder", action="append", metavar="LAYER=NAME")
    found.add_argument("--near-images", action="store_true", help="use near-duplicate images")
    found.add_argument("--video", action="store_true", help="frames that drift slowly")
    found.add_argument("--frames", type=int, default=100, help="of the video")
    found.add_argument("--thresholds", default=THRESHOLDS, help="of the vision layer, with --video")
    found.add_argument("--shapes", type=int, default=12, help="made-up images, four questions each")
    found.add_argument("--seed", type=int, default=0, help="of what is made up")
    found.add_argument("--json", action="store_true", help="print the figures and nothing else")
    return found


@dataclass(frozen=True)
class Setting:
    """A pass that is yet to be run.

    Attributes:
        tiers: None for plain vLLM.
        store: a folder under the stores' own, or None.
        prefix: whether a text stands before the image.
    """

    name: str
    tiers: PromptCacheOptions | None
    store: str | None
    prefix: bool = False


class Runner:
    """Runs passes over the same questions, and tells them.

    Args:
        work: what all passes have in common.
        stores: a folder for their stores.
        quiet: whether nothing is printed.
    """

    def __init__(self, work: Pass, stores: Path, *, quiet: bool) -> None:
        self._work = work
        self._stores = stores
        self._quiet = quiet
        self._prefixed = tuple(replace(sample, prefix=PREFIX) for sample in work.samples)
        self._references: dict[bool, list[Row]] = {}
        self.facts: dict[str, Facts] = {}
        self.figures: dict[str, dict[str, Any]] = {}

    def plain(self, *, prefix: bool) -> tuple[list[Row], dict[str, Any]]:
        """Plain vLLM's answers, and how they change with the image.

        Args:
            prefix: whether those with a text before the image will be wanted.
        """
        samples, others = self._work.samples, tuple(other_images(self._work.samples, CONTROL))
        asked = (*samples, *(self._prefixed if prefix else ()), *others)
        rows = self._run(Setting("plain", None, None), asked, shown=len(samples))
        own, rest = rows[: len(samples)], rows[len(samples) :]
        self._references = {False: own, True: rest[: len(rest) - len(others)]}
        self._tell("plain", samples, own, None)
        by_id = {row.id: row for row in own}
        return own, reaction([(by_id[row.id], row) for row in rest[len(rest) - len(others) :]])

    def tiered(self, setting: Setting) -> None:
        """One pass with the tiers, behind plain vLLM's."""
        samples = self._prefixed if setting.prefix else self._work.samples
        references = self._references[setting.prefix]
        rows = self._run(setting, samples, shown=len(samples), references=references)
        self._tell(setting.name, samples, rows, references)

    def _run(
        self,
        setting: Setting,
        samples: tuple[Sample, ...],
        *,
        shown: int,
        references: Sequence[Row] | None = None,
    ) -> list[Row]:
        work = replace(
            self._work,
            name=setting.name,
            samples=samples,
            prompt_cache=setting.tiers,
            store=None if setting.store is None else self._stores / setting.store,
        )
        rows: list[Row] = []
        with _bar() as bar:
            task = bar.add_task(f"{setting.name}: starting vLLM", total=None)
            for told in run(work):
                if isinstance(told, Facts):
                    self.facts[setting.name] = told
                    continue
                place = len(rows)
                rows.append(told)
                bar.update(task, description=setting.name, completed=len(rows), total=len(samples))
                if place < shown and not self._quiet:
                    reference = None if references is None else references[place]
                    bar.console.print(
                        line(samples[place], told, reference),
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
        return rows

    def _tell(
        self,
        name: str,
        samples: Sequence[Sample],
        rows: Sequence[Row],
        references: Sequence[Row] | None,
    ) -> None:
        self.figures[name] = figures_of(samples, rows, references, self.facts[name])
        if not self._quiet:
            print(table(f"\n{name}", self.figures[name]), end="\n\n", flush=True)


def _bar() -> Progress:
    """On the terminal, lines above it; without one, lines alone."""
    console = Console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def settings(arguments: argparse.Namespace, tiers: PromptCacheOptions) -> list[Setting]:
    """The passes with the tiers, in their order."""
    if not arguments.video:
        return [
            Setting("cold", tiers, "store"),
            Setting("warm", tiers, "store"),
            Setting("prefix", tiers, "store", prefix=True),
        ]
    off = replace(tiers, near_images=False)
    passes = [Setting("near off", off, "off"), Setting("near off, warm", off, "off")]
    for threshold in _thresholds(arguments.thresholds):
        chosen = replace(
            tiers, near_images=True, thresholds={**tiers.thresholds, "vision": threshold}
        )
        passes.append(Setting(f"near {threshold:g}", chosen, f"near-{threshold:g}"))
    return passes


def _thresholds(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--thresholds {text}: write numbers with commas between") from error


def _samples(arguments: argparse.Namespace, folder: Path) -> tuple[Sample, ...]:
    given = (arguments.questions, arguments.images)
    if None in given and given != (None, None):
        raise OptionError("--questions and --images belong together: give both")
    if arguments.limit is not None and arguments.limit < 1:
        raise OptionError(f"--limit {arguments.limit}: use a number from 1 up")
    questions, images = given
    if questions is None and arguments.video:
        questions, images = make_video(folder, arguments.frames, arguments.seed)
    elif questions is None:
        questions, images = make_shapes(folder, arguments.shapes, arguments.seed)
    return tuple(read_gqa(questions, images, arguments.limit))


def _store(given: Path | None, folder: Path) -> Path:
    if given is None:
        return folder
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        raise OptionError(f"--store {given} is not empty: the cold pass needs a new folder")
    return given


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all passes; the figures.

    Args:
        folder: for what is made up, and what is not to be kept.

    Raises:
        SemKVError: an option, a file or the model cannot be used.
    """
    encoders = arguments.tier_encoder or (VIDEO_ENCODERS if arguments.video else ENCODERS)
    tiers, _ = cache_options(arguments.prompt_cache, encoders)
    assert tiers is not None
    if arguments.near_images:
        tiers = replace(tiers, near_images=True)
    layers = dict(given.split("=", 1) for given in encoders)
    if arguments.video and "vision" not in layers:
        raise OptionError("--video wants a layer `vision`: --tier-encoder vision=phash")
    if (template := arguments.prompt_template) is not None and QUESTION not in template:
        raise OptionError(f"--prompt-template {template!r}: write {QUESTION} where it stands")
    passes = settings(arguments, tiers)
    args = engine_args(arguments.engine_arg)
    stores = _store(arguments.store, folder / "stores")
    samples = _samples(arguments, folder / "data")
    model = arguments.model
    if model is None:
        from workbench.tiny_models import build_tiny_model

        model = str(build_tiny_model(TINY, folder / TINY))
        args = {**TINY_ARGS, **args}
    work = Pass(
        name="",
        model=model,
        engine_args={"limit_mm_per_prompt": {"image": 1}, **args},
        samples=samples,
        max_tokens=arguments.max_tokens,
        template=template,
        encoders=layers,
        tower=arguments.vision_tower,
    )
    runner = Runner(work, stores, quiet=arguments.json)
    plain, control = runner.plain(prefix=any(setting.prefix for setting in passes))
    for setting in passes:
        runner.tiered(setting)
    figures = {
        "model": {
            "name": arguments.model or f"tiny {TINY}",
            "weights": "given" if arguments.model else "random",
            "architecture": runner.facts["plain"].architecture,
            "vision_tower": runner.facts["plain"].tower,
            "engine_args": {name: str(value) for name, value in args.items()},
        },
        "questions": len(samples),
        "images": len({sample.image for sample in samples}),
        "prompt_tokens": summary([row.report["prompt_tokens"] for row in plain]),
        "max_tokens": arguments.max_tokens,
        "tiers": tiers.to_mapping(),
        "encoders": layers,
        "another_image": control,
        "passes": runner.figures,
    }
    if arguments.video:
        figures["video"] = video(runner.figures, [setting.name for setting in passes])
    if not arguments.json:
        print(words(figures))
    return figures


def video(passes: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Of each pass with the tiers: what the vision layer served, and what that saved and cost."""
    found: dict[str, Any] = {}
    plain = passes["plain"]
    for name in names:
        own = passes[name]
        found[name] = {
            "frames": own["requests"],
            "vision_hits": own["tiers"].get(VISION, {"hit": 0})["hit"],
            "tower_calls": own["tower_calls"],
            "tower_calls_saved": plain["tower_calls"] - own["tower_calls"],
            "answers_same": own["answers_same"],
            "logprob_difference": own["logprob_difference"],
            "latency_s": own["latency_s"],
            "tokens_reused": round(own["tokens_reused"] / own["tokens"], 4),
            "stored_prompts": own["store"]["stored_prompts"],
        }
    return found


def words(figures: Mapping[str, Any]) -> str:
    """What is to be known of the figures, for people."""
    control, model = figures["another_image"], figures["model"]
    lines = []
    if "video" in figures:
        lines.append(
            f"{'':<16}{'vision hits':>12}{'tower calls':>12}{'saved':>7}{'answers same':>14}"
            f"{'logprobs':>20}{'latency, s':>12}"
        )
        for name, own in figures["video"].items():
            difference = own["logprob_difference"]
            told = f"{difference['median']:.2g}, max {difference['max']:.2g}"
            same = f"{own['answers_same']} of {own['frames']}"
            lines.append(
                f"{name:<16}{own['vision_hits']:>12}{own['tower_calls']:>12}"
                f"{own['tower_calls_saved']:>7}{same:>14}{told:>20}"
                f"{own['latency_s']['median']:>12.3f}"
            )
        lines.append("")
    other = "the next frame" if "video" in figures else "another image"
    lines.append(
        f"Control, plain vLLM: with {other} {control['answers_changed']} of {control['questions']}"
        f" answers change."
    )
    if model["weights"] == "random":
        lines.append(
            "The model's weights are random: its answers are right by chance only. What counts is that"
            " they are plain vLLM's."
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parser().parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(arguments, Path(folder))
    except SemKVError as error:
        sys.exit(f"vqa: {error}")
    name = "vqa_video" if arguments.video else "vqa"
    path = save(name, figures, lambda figure: draw_passes(figure, figures["passes"]))
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        print(f"written to {path.relative_to(ROOT)}")
