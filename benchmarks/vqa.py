"""Questions about images in vLLM, with and without the tiers.

    python benchmarks/vqa.py --questions FILE.json --images FOLDER --model MODEL   # GQA's format
    python benchmarks/vqa.py                         # shapes that it draws, a tiny random model
    python benchmarks/vqa.py --video                 # 100 frames that drift slowly

Each pass has a process and an engine of its own:

plain    vLLM without our connectors and without its prefix cache: the uncached answers
cold     the tiers and an empty store
warm     the same on the store that is left
prefix     on that store too, with a text before each image: stored KV does not fit, images' features do

With `--video`: plain, cold and warm with near-duplicate images found but not used, and one pass that
uses them for each threshold of the vision layer, each on an empty store.

A question's line is that of its request, and behind it the calls of the vision tower, counted by a hook
on that module in vLLM's worker, `answer match` with plain vLLM's answer, token by token, and `ground
truth match` with the right answer. docs/vqa.md says what the figures mean.

Writes build/bench/vqa.json and vqa.png (vqa_video with `--video`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workbench.vqa.command import main

if __name__ == "__main__":
    main()
