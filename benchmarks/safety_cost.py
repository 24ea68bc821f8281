"""What keeping tenants apart and refusing bad KV costs, by clocks inside the process.

* To the first token: vLLM's engine and our connector in this process, a prompt of stored chunks, blended.
  Each of the functions that are there for safety's sake is timed; their sum is told beside the time from
  handing the request in to its first token. What stands in front of the server is timed by itself, with a
  body of the same prompt.
* To load: a chunk file's layers from the page cache, the first time in a process and again.

    python benchmarks/safety_cost.py [--model FOLDER] [--chunk-tokens 512] [--chunks 4] [--asked 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from semkv_rag import Engine
from semkv_rag.config import ReuseOptions
from semkv_rag.connector.scheduler import block_hashes, planner
from semkv_rag.connector.scheduler.precedence import Precedence
from semkv_rag.connector.worker.spoiling import Spoiling
from semkv_rag.server.front import VALUES_PER_SECOND, Front
from semkv_rag.server.limits import Limits, Pace
from semkv_rag.server.tenants import Tenancy
from semkv_rag.store import ChunkFile, KVStore
from semkv_rag.store.files import tensor_file
from semkv_rag.store.files.finite import KnownFinite
from workbench.chunks import random_tokens, store_chunks
from workbench.figures import save
from workbench.in_process import Clock, connected, to_first_token
from workbench.settings import READER

BLOCK = 32
QUESTION = 40
SETTLE_S = 2.5
"""Files that were just written are not taken for known yet."""


def in_front(prompt: list[int], count: int) -> float:
    """What the layer in front of vLLM's server takes for one request, ms: the median."""

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    tenancy = Tenancy.of_keys(
        "default", {"a key": "a tenant"}, {"operator"}, trust_request=False, reuse=ReuseOptions()
    )
    Front.configure(tenancy, Limits(), None)
    front = Front(app)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
    headers = [(b"authorization", b"Bearer a key"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200

    async def ask() -> float:
        Front.pace = Pace(
            VALUES_PER_SECOND
        )  # one request after the other at once would wait for it
        began = time.perf_counter()
        await front({**scope, "headers": list(headers)}, receive, send)
        return (time.perf_counter() - began) * 1000

    return statistics.median(asyncio.run(ask()) for _ in range(count))


def not_known() -> AbstractContextManager[object]:
    """Inside the block no file is known to be finite but those that are read in it."""
    return patch.object(tensor_file, "_KNOWN", KnownFinite())


def loading(path: Path, count: int) -> dict[str, float]:
    """Layers of a chunk file from the page cache, ms for the whole file: medians, in turns."""

    def load() -> float:
        with ChunkFile(path, model=None) as file:
            began = time.perf_counter()
            for index in range(file.header.layers):
                file.layer(index)
            return (time.perf_counter() - began) * 1000

    def unchecked() -> float:
        with patch.object(tensor_file, "is_finite", lambda _tensor, _content: True):
            return load()

    load()
    first, again, without = [], [], []
    for _ in range(count):
        without.append(unchecked())
        with not_known():
            first.append(load())
            again.append(load())
    size = path.stat().st_size
    told = {"first_ms": first, "again_ms": again, "without_ms": without}
    return {
        "file_bytes": float(size),
        **{name: statistics.median(times) for name, times in told.items()},
        "first_to_without": statistics.median(a / b for a, b in zip(first, without, strict=True)),
        "again_to_without": statistics.median(a / b for a, b in zip(again, without, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=READER)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--asked", type=int, default=20)
    args = parser.parse_args()
    length = args.chunks * args.chunk_tokens + QUESTION
    common = {
        "dtype": args.dtype,
        "max_model_len": -(-(length + BLOCK) // BLOCK) * BLOCK,
        "kv_cache_memory_bytes": 1 << 30,
        "block_size": BLOCK,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Engine(str(args.model), store=folder, **common) as engine:
            texts = [random_tokens(seed, args.chunk_tokens) for seed in range(args.chunks)]
            chunks = store_chunks(engine, texts, namespace="default")
        with KVStore(folder, read_only=True) as store:
            paths = [store.path(one.model, one.namespace, one.id) for one in store.chunks()]
        time.sleep(SETTLE_S)
        llm = connected(args.model, folder, **common)
        clock = Clock()
        clock.wrap(tensor_file, "is_finite")
        clock.wrap(Spoiling, "find")
        clock.wrap(planner, "salt_blocks")
        clock.wrap(block_hashes.SaltedHasher, "__call__")
        for method in ("arrived", "ended", "stepped", "may_begin"):
            clock.wrap(Precedence, method)
        prompt = [token for chunk in chunks for token in chunk.tokens]
        prompts = [
            prompt + random_tokens(1000 + number, QUESTION) for number in range(args.asked + 2)
        ]
        for number, warm in enumerate(prompts[:2]):
            to_first_token(llm, warm, f"warm {number}")
        rows: dict[str, dict[str, Any]] = {}
        for case in ("read again", "read first"):
            times, spent = [], []
            parts: dict[str, float] = defaultdict(float)
            for number, asked in enumerate(prompts[2:]):
                clock.ms.clear()
                with not_known() if case == "read first" else nullcontext():
                    times.append(to_first_token(llm, asked, f"{case} {number}"))
                spent.append(sum(clock.ms.values()))
                for part, ms in clock.ms.items():
                    parts[part] += ms / args.asked
            rows[case] = {
                "ttft_ms": statistics.median(times),
                "safety_ms": statistics.median(spent),
                "share": statistics.median(a / b for a, b in zip(spent, times, strict=True)),
                "parts_ms": dict(parts),
            }
        front_ms = in_front(prompts[0], 200)
        loads = loading(paths[0], 10 * args.asked)
    for case, row in rows.items():
        row["front_ms"] = front_ms
        row["share_with_front"] = row["share"] + front_ms / row["ttft_ms"]
        print(
            f"{case}: first token {row['ttft_ms']:.0f} ms, of it for safety {row['safety_ms']:.2f} ms"
            f" ({row['share']:.2%}), with {front_ms:.2f} ms in front {row['share_with_front']:.2%}"
        )
        for part, ms in row["parts_ms"].items():
            print(f"    {part}: {ms:.3f} ms")
    print(
        f"a file of {loads['file_bytes'] / 1e6:.1f} MB: {loads['without_ms']:.2f} ms without the look,"
        f" x{loads['first_to_without']:.3f} at first, x{loads['again_to_without']:.3f} again"
    )
    figures = {
        "model": args.model.name,
        "dtype": args.dtype,
        "chunk_tokens": args.chunk_tokens,
        "chunks": args.chunks,
        "question_tokens": QUESTION,
    }
    save("safety_cost", {**figures, "first_token": rows, "loading": loads})


if __name__ == "__main__":
    main()
