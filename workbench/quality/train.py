"""Trains one model of the family, from a seed.

    python -m workbench.quality.train OUT [--seed 0] [--steps 750] [--layer1 0] [--start CHECKPOINT]

Goes on from OUT/checkpoint.pt where one lies. One core and one thread suffice.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from workbench.quality import grammar, teaching, words
from workbench.quality.batches import QUESTION_LENGTH, Batch, collate, masks
from workbench.quality.grammar import FULL, Context, Fact, Recipe
from workbench.quality.network import NAME_SPREAD, Model, Shape

LEVELS = (
    Recipe((1, 1), (2, 2), (4, 6), depth=1, filler=0.0, lists=0.2),
    Recipe((1, 1), (2, 3), (5, 7), depth=2, filler=0.03),
    Recipe((1, 2), (2, 4)),
    FULL,
)
"""Ever harder contexts; the next one starts when a model is right on `PASS` of this one's questions."""
LATER = (*LEVELS[:-1], replace(FULL, pronouns=0.35))
"""What a second stage of training sees: pronouns are what the first learns last."""
PASS = 0.85
QUESTIONS = 12
BATCH_TOKENS = 3600
NEW_NAMES_FROM = 300
"""From this step on every step has names nobody has seen."""
HELP_UNTIL = 450
"""Where to look is told less and less until this step; contexts are as hard as can be from then on."""


def ask(rng: random.Random, context: Context) -> list[Fact]:
    """Some facts to ask about, with more of those that are told by reference."""
    told = [f for f in context.facts if f.kind != "root"]
    roots = [f for f in context.facts if f.kind == "root"]
    chosen = rng.sample(roots, min(2, len(roots)))
    chosen += rng.sample(told, min(QUESTIONS - 2, len(told)))
    return chosen


class Source:
    """Training batches of about `BATCH_TOKENS` tokens, of contexts of about one length."""

    def __init__(self, seed: int, levels: Sequence[Recipe]) -> None:
        self.rng, self.levels = random.Random(seed), levels
        self.level = 0
        self.ready: list[Batch] = []

    def rise(self, level: int) -> None:
        self.level, self.ready = level, []

    def next(self) -> Batch:
        if not self.ready:
            self.ready = list(self._fill())
            self.rng.shuffle(self.ready)
        return self.ready.pop()

    def _fill(self) -> Iterator[Batch]:
        rows = []
        for _ in range(200):
            easier = self.level > 0 and self.rng.random() < 0.2
            context = grammar.make_context(self.rng, self.levels[self.level - easier])
            rows.append((context, ask(self.rng, context)))
        rows.sort(key=lambda row: len(row[0].tokens))
        taken: list[tuple[Context, list[Fact]]] = []
        size = 0
        for row in rows:
            taken.append(row)
            size += len(row[0].tokens) + QUESTION_LENGTH * len(row[1])
            if size >= BATCH_TOKENS:
                yield collate(taken)
                taken, size = [], 0


class Names:
    """New directions for the names of training, so that matching any two is learnt and not 240 of them.

    Not from the start: what is to be matched is found sooner with names that stay.
    """

    def __init__(self, table: Tensor, seed: int) -> None:
        self._seed = seed
        self._groups = (words.NAMES, words.PROPER)
        self.first = [table[group].clone() for group in self._groups]

    @torch.no_grad()
    def redraw(self, table: Tensor, step: int) -> None:
        draw = torch.Generator().manual_seed(1_000_000 * self._seed + step)
        for group, first in zip(self._groups, self.first, strict=True):
            own = torch.randn(first.shape, generator=draw) * NAME_SPREAD
            table[group] = first.mean(0) + own

    @torch.no_grad()
    def restore(self, table: Tensor) -> None:
        for group, first in zip(self._groups, self.first, strict=True):
            table[group] = first


def see(rng: random.Random, batch: Batch) -> tuple[tuple[Tensor, Tensor], list[bool]]:
    """A fifth of the rows with documents apart, a fifth with chunks apart (these are given too), and in
    half
    of all rows questions see only the chunk that tells of what they ask."""
    rows = len(batch.lengths)
    kind = [rng.random() for _ in range(rows)]
    by_chunk = [k < 0.2 for k in kind]
    whole = torch.where(batch.chunks >= 0, 0, -1)
    groups = torch.stack(
        [
            batch.chunks[r] if k < 0.2 else batch.documents[r] if k < 0.4 else whole[r]
            for r, k in enumerate(kind)
        ]
    )
    hide = torch.tensor([rng.random() < 0.5 for _ in range(rows)])
    return masks(batch, groups, hide), by_chunk


def train(out: Path, *, seed: int, steps: int, layer1: float, start: Path | None) -> None:
    """Trains and leaves OUT/checkpoint.pt; prints what it sees every 25 steps."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    model, probes = Model(shape), teaching.Probes(shape.hidden)
    table = model.embed_tokens.weight
    source, rng = (
        Source(seed + (100 if start is None else 300), LEVELS if start is None else LATER),
        random.Random(seed + 200),
    )
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    others += list(probes.parameters())
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="original")
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    state = {"step": 0}
    kept = out / "checkpoint.pt"
    mean: dict[str, float] = {}
    begin_from = kept if kept.exists() else start
    if begin_from is not None:
        found = torch.load(begin_from, weights_only=False)
        model.load_state_dict(found["model"])
        probes.load_state_dict(found["probes"])
        if kept.exists():
            muon.load_state_dict(found["muon"])
            adam.load_state_dict(found["adam"])
            rng.setstate(found["rng"])
            state["step"] = found["step"]
        source.rise(found["level"])
        if kept.exists():
            source.rng.setstate(found["source"])
            source.ready, mean = found["ready"], found["mean"]
    # Another seed's names have other class directions: a start's own count.
    names = Names(table.detach(), seed)
    if kept.exists():
        names.first = found["names"]
    blocks = [torch.compile(block.forward, dynamic=True) for block in model.layers]
    began, tokens = time.monotonic(), 0
    for step in range(state["step"], steps):
        done = step / steps
        if source.level < len(LEVELS) - 1 and step > HELP_UNTIL and start is None:
            source.rise(len(LEVELS) - 1)
        pace = min(1.0, (step + 1) / 30) * min(1.0, max(0.02, (1 - done) / 0.3))
        for optimizer, rate in ((muon, 0.02), (adam, 3e-3)):
            for group in optimizer.param_groups:
                group["lr"] = rate * pace * (1.0 if start is None else 0.6)
        if step >= NEW_NAMES_FROM or start is not None:
            names.redraw(table, step)
        batch = source.next()
        seen, by_chunk = see(rng, batch)
        told = teaching.lesson(batch, by_chunk)
        help_ = max(0.0, 1 - step / HELP_UNTIL) if start is None else 0.0
        with torch.autocast("cpu", torch.bfloat16):
            states = model.states(
                batch.tokens, batch.positions, seen, blocks=blocks, dtype=torch.bfloat16
            )
            answers, shares = teaching.answer_loss(model, states[-1], told)
            values, known = teaching.value_loss(states, told, probes)
            loss = answers + 0.5 * values
            shares |= {"known": known, "answer": answers.item(), "value": values.item()}
            if help_ > 0:
                back = teaching.back_loss(model, states, told, probes)
                looks, hits = teaching.attention_loss(model, states, told)
                loss = loss + help_ * (0.3 * back + 0.5 * looks)
                shares |= hits | {"back": back.item()}
            if start is not None:
                looks, hits = teaching.pronoun_loss(model, states, told)
                loss = loss + max(0.0, 1 - 2 * done) * 0.3 * looks
                shares |= hits
            if layer1 > 0:
                apart, _ = masks(batch, batch.chunks)
                turn = model.turn(batch.positions[:, : batch.split], torch.bfloat16)
                alone = model.layers[0](
                    states[0][:, : batch.split],
                    turn,
                    (apart.bfloat16(), seen[1][:, :, :0, : batch.split].bfloat16()),
                )
                quiet, loud = teaching.layer1_loss(
                    states[1][:, : batch.split], alone, batch, by_chunk
                )
                loss = loss + layer1 * (quiet + loud)
                shares |= {"quiet": quiet.item(), "loud": loud.item()}
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        model.zero_grad(set_to_none=True)
        probes.zero_grad(set_to_none=True)
        for key, value in shares.items():
            mean[key] = value if key not in mean else 0.92 * mean[key] + 0.08 * value
        tokens += batch.tokens.numel()
        if (step + 1) % 25 == 0:
            spent = time.monotonic() - began
            told_now = " ".join(f"{key} {mean[key]:.2f}" for key in sorted(mean))
            print(
                f"{step + 1} level {source.level} {told_now} | {tokens / spent:.0f} tokens/s",
                flush=True,
            )
        passed = [v for k, v in mean.items() if k[0] in "xo" and k[1:].isdigit() and k != "x3"]
        if source.level < len(LEVELS) - 1 and step % 10 == 9 and min(passed) > PASS:
            source.rise(source.level + 1)
            mean.clear()
            print(f"{step + 1} up to level {source.level}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            if step + 1 == steps:
                names.restore(table)
            found = {
                "model": model.state_dict(),
                "probes": probes.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
                "source": source.rng.getstate(),
                "ready": source.ready,
                "mean": mean,
                "names": names.first,
                "rng": rng.getstate(),
                "level": source.level,
                "step": step + 1,
            }
            torch.save(found, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--layer1", type=float, default=0.0)
    parser.add_argument("--start", type=Path)
    given = parser.parse_args()
    train(given.out, seed=given.seed, steps=given.steps, layer1=given.layer1, start=given.start)
