"""An engine of whichever version of semkv-rag Python finds, which answers prompts named on stdin.

`benchmarks/two_versions.py` starts it with `python -P`, so that nothing of this checkout is found beside
the version that is asked for: it imports the package alone, by names that older versions have.

    python -P workbench/one_version.py MODEL STORE ARTICLES PICKED CHUNK_TOKENS

Writes the path of the package once it can answer. Then it reads lines of JSON
`{"seed": 3, "reuse": {...}}` and writes one for each: times in ms.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import semkv_rag
from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import precompute_texts
from semkv_rag.engine import Engine


def main() -> None:
    model, store, folder, picked, chunk_tokens = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    length, count = int(chunk_tokens), int(picked)
    files = sorted(Path(folder).rglob("*.md"))[: count + 3]
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 30}
    with Engine(model, store=Path(store), max_model_len=8192, **options) as engine:
        encode = engine.tokenizer.encode
        texts = [engine.tokenizer.decode(encode(file.read_text())[:length]) for file in files]
        precompute_texts(engine, [(str(n), [text]) for n, text in enumerate(texts)])
        print(semkv_rag.__file__, file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            rng = random.Random(asked["seed"])
            prompt = [token for text in rng.sample(texts, count) for token in encode(text)[:length]]
            prompt += encode(f"\n\nQuestion {asked['seed']}: what is said of these?")
            engine.reset_prefix_cache()
            time.sleep(0.2)  # until the engine's process is idle
            before = cpu_seconds()
            answer = engine.generate(
                prompt,
                sampling={"temperature": 0.0, "max_tokens": 1},
                reuse=ReuseOptions.from_mapping(asked["reuse"]),
            )
            told = {
                "ttft_ms": answer.ttft_ms,
                "cpu_ms": (cpu_seconds() - before) * 1000,
                "prompt_tokens": len(prompt),
                "reused_tokens": answer.report.reused_tokens,
            }
            print(json.dumps(told), file=answers, flush=True)


def cpu_seconds() -> float:
    """What this process and those it started have computed so far."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


if __name__ == "__main__":
    main()
