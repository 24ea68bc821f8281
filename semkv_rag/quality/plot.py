"""The plot of a measurement: agreement by charged cost. Needs matplotlib, from the extra `plot`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from semkv_rag.errors import MissingExtraError, OptionError
from semkv_rag.quality.result import QualityResult
from semkv_rag.quality.settings import AS_STORED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Say now what would fail behind a long measurement.

    Raises:
        OptionError: nothing can be written there, or it is of no kind that can be drawn.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in KINDS or not path.absolute().parent.is_dir():
        raise OptionError(
            f"{path}: give a file ending in {', '.join(KINDS)}, in a folder that is there"
        )
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")


def plot(result: QualityResult, path: Path) -> None:
    """Draw what was compared, which must be something, into a file; errors as `check_plot`."""
    check_plot(path)
    from matplotlib.figure import Figure

    assert result.full is not None
    with_answers = result.full.f1 is not None
    count = 3 if with_answers else 2
    figure = Figure(figsize=(5 * count, 4), layout="constrained")
    panels = figure.subplots(1, count)
    _draw(panels[0], result, "agreement", "equal tokens, %", 100)
    _draw(panels[1], result, "kl", "KL from full prefill, nats a token", 1)
    if with_answers:
        _draw(panels[2], result, "f1", "F1, %", 100)
        panels[2].axhline(100 * (result.full.f1 or 0), color="grey", linestyle=":")
    panels[0].legend(fontsize="small")
    figure.suptitle(
        f"{Path(result.model).name}: {result.full.questions} questions, answers of up to "
        f"{result.max_tokens} tokens"
    )
    figure.savefig(path)


def _draw(axes: Axes, result: QualityResult, field: str, label: str, scale: float) -> None:
    selectors = dict.fromkeys(line.selector for line in result.lines)
    for selector in selectors:
        lines = [line for line in result.lines if line.selector == selector]
        lines.sort(key=lambda line: line.charged_ratio)
        across = [100 * line.charged_ratio for line in lines]
        values = [getattr(line, field) for line in lines]
        means = [scale * getattr(value, "mean", value) for value in values]
        name = AS_STORED if selector == "none" else selector
        (drawn,) = axes.plot(across, means, marker="o", label=name)
        if hasattr(values[0], "low"):
            low, high = (
                [scale * getattr(value, end) for value in values] for end in ("low", "high")
            )
            axes.vlines(across, low, high, color=drawn.get_color(), alpha=0.5)
        for line, x, y in zip(lines, across, means, strict=True):
            if line.preset:
                axes.annotate(line.name, (x, y), xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("charged, % of full prefill")
    axes.set_ylabel(label)
