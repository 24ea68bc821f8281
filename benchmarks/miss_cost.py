"""What a miss costs: how much of its time to first token is ours, by a clock inside the process.

vLLM's engine and our connector run in this process. A prompt of which nothing is stored is looked up and
computed. Two things are added up and told beside the time to its first token:

* from the request's arrival at the scheduler until it is let in, while it waits for the look-up; what
  vLLM itself does in between counts too;
* all that our connector does behind that, in the scheduler and in the worker.

    python benchmarks/miss_cost.py [--model FOLDER] [--tokens 1024,4096] [--stored 400] [--asked 5]

Writes build/bench/miss_cost.json. Three minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from semkv_rag import Engine
from semkv_rag.connector.connector import SemKVConnector
from workbench.chunks import random_tokens, store_chunks
from workbench.figures import save
from workbench.in_process import Clock, connected, to_first_token

CHUNK = 64
SCHEDULER = ("build_connector_meta", "update_connector_output", "request_finished_all_groups")
WORKER = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


class LetIn:
    """How long a request waits from its arrival until it is let in, ms."""

    def __init__(self) -> None:
        self.ms = 0.0
        arrive, let_in = SemKVConnector.on_new_request, SemKVConnector.update_state_after_alloc
        came = 0.0

        def arriving(connector: Any, request: Any) -> None:
            nonlocal came
            came = time.perf_counter()
            arrive(connector, request)

        def letting_in(connector: Any, *args: Any) -> None:
            let_in(connector, *args)
            self.ms = (time.perf_counter() - came) * 1000

        SemKVConnector.on_new_request = arriving  # type: ignore[method-assign, assignment]
        SemKVConnector.update_state_after_alloc = letting_in  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--stored", type=int, default=400, help=f"chunks of {CHUNK} tokens")
    parser.add_argument("--asked", type=int, default=5)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.tokens.split(",")]
    common: dict[str, Any] = {
        "max_model_len": max(lengths) + 32,
        "kv_cache_memory_bytes": 1 << 30,
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Engine(str(arguments.model), store=folder, **common) as engine:
            tokens = [random_tokens(seed, CHUNK) for seed in range(arguments.stored)]
            store_chunks(engine, tokens, namespace="default")
        llm = connected(arguments.model, folder, **common)
        clock, let_in = Clock(), LetIn()
        for method in (*SCHEDULER, *WORKER):
            clock.wrap(SemKVConnector, method)
        for length in lengths:
            rows.append(row(llm, clock, let_in, length, arguments.asked))
            print(rows[-1], flush=True)
    told = {"model": arguments.model.name, "stored_chunks": arguments.stored, "chunk_tokens": CHUNK}
    save("miss_cost", {**told, "lengths": rows})


def row(llm: Any, clock: Clock, let_in: LetIn, length: int, asked: int) -> dict[str, Any]:
    """Medians of one prompt length, behind a request that warms up."""
    times, waited, spent, shares = [], [], [], []
    for number in range(-1, asked):
        clock.ms.clear()
        prompt = random_tokens(10_000 + length + number, length)
        taken = to_first_token(llm, prompt, f"{length} {number}")
        if number >= 0:
            times.append(taken)
            waited.append(let_in.ms)
            spent.append(sum(clock.ms.values()))
            shares.append((waited[-1] + spent[-1]) / taken)
    return {
        "prompt_tokens": length,
        "ttft_ms": round(statistics.median(times), 1),
        "let_in_ms": round(statistics.median(waited), 3),
        "connector_ms": round(statistics.median(spent), 3),
        "share": round(statistics.median(shares), 5),
        "largest_share": round(max(shares), 5),
    }


if __name__ == "__main__":
    main()
