"""Cheap corrections of what a blend leaves stale: does any pay?

    python -m workbench.quality.corrections [--models FOLDER ...] [--contexts 100] [--seed 5]

Blends with HKVD at layers 1 and 2, at several ratios, and on top of each, in the layers behind the check:

* mean shift: the picked tokens' mean difference between fresh and stored keys and values, times a factor,
  is added to the stored keys and values of the tokens that were not picked, chunk by chunk or over all;
* APE (arXiv 2502.05431, section 4): questions attend to reused text at a lower temperature, and the
  weight it gets as a whole against the exact text and the question itself is raised to a power;
* both.

Prints, for each, how many more questions are right than without it, and by how much the divergence
KL(full || blend) at the answers' words changes, with 95 % intervals by context. Writes
build/bench/corrections.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from workbench.quality.batches import Batch, masks
from workbench.quality.export import MODELS, load
from workbench.quality.network import Hook, Model, rotate
from workbench.quality.reuse import KV, pick, prefill, right, whole
from workbench.quality.study import make_batches

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (1, 2)
RATIOS = (0.0, 0.1, 0.2)
KeysValues = tuple[Tensor, Tensor]
"""Keys and values of the context, each [rows, heads, split, head_dim]."""


@dataclass(frozen=True)
class Shift:
    """How much of the mean difference is added, and whether each chunk has its own mean."""

    factor: float
    by_chunk: bool


@dataclass(frozen=True)
class Ape:
    """The temperature, and the power of the reused text's summed weight; 1 and 1 change nothing."""

    temperature: float
    scaling: float


@dataclass(frozen=True)
class Correction:
    """What is put right behind the check layer."""

    shift: Shift | None = None
    ape: Ape | None = None


NONE = "none"
CORRECTIONS: dict[str, Correction] = {
    NONE: Correction(),
    "shift 0.25 by chunk": Correction(Shift(0.25, by_chunk=True)),
    "shift 0.5 by chunk": Correction(Shift(0.5, by_chunk=True)),
    "shift 1 by chunk": Correction(Shift(1.0, by_chunk=True)),
    "shift 0.25": Correction(Shift(0.25, by_chunk=False)),
    "shift 0.5": Correction(Shift(0.5, by_chunk=False)),
    "APE 0.9 0.9": Correction(ape=Ape(0.9, 0.9)),
    "APE 0.7 0.7": Correction(ape=Ape(0.7, 0.7)),
    "APE 0.9 1": Correction(ape=Ape(0.9, 1.0)),
    "APE 1 0.9": Correction(ape=Ape(1.0, 0.9)),
    "shift 0.25 by chunk, APE 0.9 0.9": Correction(Shift(0.25, by_chunk=True), Ape(0.9, 0.9)),
}
"""By name. 0.9 and 0.9 are what APE's authors run with."""


def shifted(
    model: Model, batch: Batch, stored: KeysValues, fresh: KeysValues, picked: Tensor, how: Shift
) -> KeysValues:
    """`stored`, moved by the picked tokens' mean difference to `fresh`; `picked` is [rows, split].

    Keys are turned back before their differences are averaged, or those of far tokens would cancel out.
    Text in front of the first picked token's chunk (or a chunk without any) is left alone, and so is the
    prompt's first chunk, which is exact.
    """
    inexact = batch.chunks > 0
    groups = batch.chunks.clamp_min(0) if how.by_chunk else torch.zeros_like(batch.chunks)
    member = F.one_hot(groups).float() * inexact[..., None]
    counted = member * picked[..., None]
    share = counted / counted.sum(1, keepdim=True).clamp_min(1)
    positions = batch.positions[:, : batch.split]
    forth = model.turn(positions, torch.float32)
    back = (forth[0], -forth[1])

    def mean(difference: Tensor) -> Tensor:
        by_group = torch.einsum("rsg,rhsd->rhgd", share, difference)
        return how.factor * torch.einsum("rsg,rhgd->rhsd", member, by_group)

    keys = stored[0] + rotate(mean(rotate(fresh[0] - stored[0], back)), forth)
    return keys, stored[1] + mean(fresh[1] - stored[1])


def tempered(scores: Tensor, reused: Tensor, how: Ape) -> Tensor:
    """A question's attention scores [rows, heads, questions, columns] with APE over `reused` columns.

    `reused`: [rows, columns], bool. The softmax of what is returned is the mixture of the paper: reused
    columns share `(sum of exp(score / temperature)) ** scaling`, all others keep `exp(score)`.
    """
    chosen = reused[:, None, None]
    sharper = scores / how.temperature
    together = torch.where(chosen, sharper, -torch.inf).logsumexp(-1, keepdim=True)
    together = together.nan_to_num(neginf=0.0)
    return torch.where(chosen, sharper + (how.scaling - 1) * together, scores)


@dataclass(frozen=True, eq=False)
class Known:
    """A batch under full prefill and what is stored of it.

    Attributes:
        states: the embeddings and each layer's output.
        fresh, stored: each layer's keys and values, computed together and chunk by chunk.
    """

    batch: Batch
    states: list[Tensor]
    fresh: KV
    stored: KV


@torch.no_grad()
def know(model: Model, batch: Batch) -> Known:
    """Runs both prefills."""
    fresh: KV = []

    def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        fresh.append((key[:, :, : batch.split], value[:, :, : batch.split]))
        return key, value

    hooks: list[Hook | None] = [keep] * len(model.layers)
    states = model.states(batch.tokens, batch.positions, masks(batch, whole(batch)), hooks)
    _, stored = prefill(model, batch, batch.chunks)
    return Known(batch, states, fresh, stored)


@torch.no_grad()
def correct(model: Model, known: Known, check: int, ratio: float, how: Correction) -> Tensor:
    """The last layer's output of a blend that keeps its check layer fresh, with `how` behind that."""
    batch, split = known.batch, known.batch.split
    deviation = sum(
        (new - old).square().sum((1, 3))
        for new, old in zip(known.fresh[check], known.stored[check], strict=True)
    )
    assert isinstance(deviation, Tensor)
    picked = pick(deviation, batch.lengths, ratio)
    computed = picked[:, None, :, None]
    reused = F.pad(batch.chunks > 0, (0, batch.tokens.shape[1] - split))
    turn = model.turn(batch.positions, torch.float32)
    for_context, for_questions = masks(batch, whole(batch))
    x = known.states[check + 1]
    for layer in range(check + 1, len(model.layers)):
        block = model.blocks()[layer]
        attention = block.self_attn
        query, key, value = attention.project(block.input_layernorm(x), turn)
        new, old = (key[:, :, :split], value[:, :, :split]), known.stored[layer]
        if how.shift is not None:
            old = shifted(model, batch, old, new, picked, how.shift)
        key, value = (
            torch.cat([torch.where(computed, n, o), all_[:, :, split:]], dim=2)
            for n, o, all_ in zip(new, old, (key, value), strict=True)
        )
        if how.ape is None:
            mixed = attention.attend(query, key, value, (for_context, for_questions))
        else:
            query = query * attention.head_dim**-0.5
            context = query[:, :, :split] @ key[:, :, :split].mT + for_context
            questions = tempered(query[:, :, split:] @ key.mT + for_questions, reused, how.ape)
            heads = [context.softmax(-1) @ value[:, :, :split], questions.softmax(-1) @ value]
            mixed = attention.o_proj(torch.cat(heads, dim=2).transpose(1, 2).flatten(2))
        x = x + mixed
        x = x + block.mlp(block.post_attention_layernorm(x))
    return x


@torch.no_grad()
def divergences(model: Model, batch: Batch, full: Tensor, last: Tensor) -> list[float]:
    """For each question, the mean KL(full || blend) in nats over its answer's words."""
    found = []
    for asked in batch.asked:
        columns = [asked.column + offset for offset in range(len(asked.fact.answer))]
        target = model.logits(full[asked.row, columns]).log_softmax(-1)
        blended = model.logits(last[asked.row, columns]).log_softmax(-1)
        found.append(F.kl_div(blended, target, log_target=True, reduction="batchmean").item())
    return found


@dataclass
class Answers:
    """By question: whether it needs another chunk, its context, and by way what came of it.

    Ways are `CHECK RATIO CORRECTION`; values are 100 for a right answer, 0 for a wrong one, and nats.
    """

    cross: list[bool] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    right: dict[tuple[int, float, str], list[float]] = field(default_factory=dict)
    divergence: dict[tuple[int, float, str], list[float]] = field(default_factory=dict)

    def add(self, other: Answers, first: int = 0) -> None:
        """Another batch's, with contexts counted from `first`, or another model's on the same ones."""
        self.cross += other.cross
        self.contexts += [first + c for c in other.contexts]
        for mine, theirs in ((self.right, other.right), (self.divergence, other.divergence)):
            for way, values in theirs.items():
                mine.setdefault(way, []).extend(values)

    def mean(self, values: Sequence[float], cross: bool) -> tuple[float, float, float]:
        """Mean over the cross questions or the controls, with its 95 % interval by context."""
        count = max(self.contexts) + 1
        total, asked = np.zeros(count), np.zeros(count)
        for value, is_cross, context in zip(values, self.cross, self.contexts, strict=True):
            if is_cross is cross:
                total[context] += value
                asked[context] += 1
        draws = np.random.default_rng(0).integers(0, count, (2000, count))
        means = total[draws].sum(1) / np.maximum(asked[draws].sum(1), 1)
        low, high = np.percentile(means, (2.5, 97.5))
        return float(total.sum() / max(asked.sum(), 1)), float(low), float(high)


def ask(model: Model, batches: Sequence[Batch]) -> Answers:
    """All questions of `batches` with every correction."""
    answers, first = Answers(), 0
    for batch in batches:
        known = know(model, batch)
        full = known.states[-1]
        part = Answers([a.fact.cross for a in batch.asked], [a.row for a in batch.asked])
        for check in CHECKS:
            for ratio in RATIOS:
                for name, how in CORRECTIONS.items():
                    if ratio == 0 and how.shift is not None:
                        continue  # nothing was picked that could tell by how much
                    last, way = correct(model, known, check, ratio, how), (check, ratio, name)
                    part.right[way] = [100.0 * ok for ok in right(model, batch, last)]
                    part.divergence[way] = divergences(model, batch, full, last)
        answers.add(part, first)
        first += len(batch.lengths)
    return answers


@dataclass(frozen=True)
class Row:
    """What comes of one correction: its means, or by how much they differ from those without any.

    Each with its interval; by `cross right`, `control right` (per cent), `cross divergence` and `control
    divergence` (nats).
    """

    check: int
    ratio: float
    correction: str
    means: dict[str, tuple[float, float, float]]


def table(answers: Answers) -> list[Row]:
    """One row for each check, ratio and correction."""
    rows = []
    for way in answers.right:
        check, ratio, name = way
        means = {}
        for what, by_way in (("right", answers.right), ("divergence", answers.divergence)):
            values = by_way[way]
            if name != NONE:
                base = by_way[check, ratio, NONE]
                values = [v - b for v, b in zip(values, base, strict=True)]
            means[f"cross {what}"] = answers.mean(values, cross=True)
            means[f"control {what}"] = answers.mean(values, cross=False)
        rows.append(Row(check, ratio, name, means))
    return rows


def _print(title: str, rows: Sequence[Row]) -> None:
    columns = {
        "cross right": ("cross, %", 1),
        "control right": ("controls, %", 1),
        "cross divergence": ("cross, nats", 3),
        "control divergence": ("controls, nats", 3),
    }
    heads = "".join(f"{head:>26s}" for head, _ in columns.values())
    print(f"\n{title}\n  {'':46s}{heads}")
    for row in rows:
        told = ""
        for column, (_, digits) in columns.items():
            sign = "" if row.correction == NONE else "+"
            mean, low, high = (f"{value:{sign}.{digits}f}" for value in row.means[column])
            told += f"{f'{mean} [{low}, {high}]':>26s}"
        name = f"HKVD@{row.check} {100 * row.ratio:g} % {row.correction}"
        print(f"  {name:46s}{told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=sorted(MODELS.glob("*/")))
    parser.add_argument("--contexts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    batches = make_batches(given.seed, given.contexts)
    together = Answers()
    results: dict[str, list[Row]] = {}
    for folder in given.models:
        began = time.monotonic()
        answers = ask(load(folder), batches)
        together.add(answers)
        results[folder.name] = table(answers)
        _print(f"{folder.name}, {time.monotonic() - began:.0f} s", results[folder.name])
    results["all"] = table(together)
    _print("all models", results["all"])
    out = ROOT / "build" / "bench" / "corrections.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({n: [vars(r) for r in rows] for n, rows in results.items()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
