"""Trains the family, from a seed, and puts it where the evaluation looks.

    python -m workbench.quality.family FOLDER [--seed 0] [--out MODELS]

First the base, in two stages, then from it each member with its own weights of the layer-1 loss. What
lies in FOLDER is gone on from. About forty minutes on a free core; one thread.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.quality.export import MODELS, export, from_checkpoint
from workbench.quality.train import train

MEMBERS = {
    "layer1-0": (0.0, 0.0, 0.0, 0.0),
    "layer1-0.1": (0.1, 0.1, 0.1, 0.1),
    "layer1-10": (10.0, 10.0, 3.0, 3.0),
}
"""By name, how much a member is made to show at layer 1 which tokens need another chunk, stage by stage.

What shows at a weight of 10 stays at one of 3, which leaves more to the answers.
"""
FIRST_STEPS, LATER_STEPS = 750, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=MODELS)
    given = parser.parse_args()
    first, second = given.folder / "first", given.folder / "second"
    train(first, seed=given.seed, steps=FIRST_STEPS, layer1=0.0, start=None)
    start = first / "checkpoint.pt"
    train(second, seed=given.seed, steps=LATER_STEPS, layer1=0.0, start=start)
    for name, weights in MEMBERS.items():
        start = second / "checkpoint.pt"
        # Other seeds, or a stage would see what the one before it has just seen.
        for stage, layer1 in enumerate(weights, 1):
            out, seed = given.folder / f"{name} {stage}", given.seed + stage
            train(out, seed=seed, steps=LATER_STEPS, layer1=layer1, start=start)
            start = out / "checkpoint.pt"
        export(from_checkpoint(start), given.out / name)


if __name__ == "__main__":
    main()
