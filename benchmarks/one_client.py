"""What one client can do to another: time to the first token while somebody sends whatever they like.

A server with two tenants. One asks a short question again and again; the other sends, for `--seconds`
each: bodies of brackets, of many numbers, of one long text; large bodies without a key; bodies that never
end; as many requests as it may at a time; calls of `forget` with thousands of names; whole documents to
precompute. Told is the p95 of the asker's time to the first token, beside its p95 while nothing else goes
on, taken before each kind.

    python benchmarks/one_client.py [--model FOLDER] [--seconds 60] [--requests 2] [--step-tokens 128]

Whoever asks waits for the step under way, whoever it is for: `--step-tokens` bounds what that takes.
Server and clients share the machine's cores. So that the asker's own waiting for one is not counted, it
runs ahead of all other processes where the system permits (`asker_ahead`); the sender runs behind them.
What the sender takes of the cores is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workbench.figures import save
from workbench.server import Server
from workbench.settings import READER

QUESTION_TOKENS = 200


def ask(
    client: httpx.Client, server: Server, key: str, prompt: list[int], tokens: int = 2
) -> float:
    """The time to the first token, ms."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {key}"}
    began = time.perf_counter()
    with client.stream(
        "POST", f"{server.base_url}/completions", json=body, headers=headers
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data:"):
                return (time.perf_counter() - began) * 1000
    raise RuntimeError("the answer has no token")


def run_ahead() -> bool:
    """Have this process get a core as soon as it wants one; False where that is not permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    return True


def measured(server: Server, seconds: float, rng: random.Random) -> list[float]:
    """Times to the first token of one who asks again and again, ms."""
    times = []
    until = time.monotonic() + seconds
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < until:
            prompt = [rng.randrange(8, 480) for _ in range(QUESTION_TOKENS)]
            times.append(ask(client, server, server.api_key, prompt))
            time.sleep(0.05)
    return times


# ---- what the other one sends, in a process of its own -------------------------------------------


def send(kind: str, base: str, key: str, model: str, requests: int, most: int) -> None:
    """Send one kind of thing until this process is ended.

    Args:
        most: the values that a body may hold.
    """
    import threading

    url = base + "/completions"
    root = base.removesuffix("/v1")
    own = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    rng = random.Random(1)
    client = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))

    def post(url: str, content: Any, headers: dict[str, str]) -> None:
        try:
            client.post(url, content=content, headers=headers)
        except httpx.HTTPError:
            time.sleep(0.01)

    def prompts() -> str:
        prompt = [rng.randrange(8, 480) for _ in range(900)]
        return json.dumps({"model": model, "prompt": prompt, "max_tokens": 100, "ignore_eos": True})

    def dripping() -> Any:
        for _ in range(300):
            yield b"["
            time.sleep(0.2)

    names = json.dumps({"sources": [f"source {n}" for n in range(50_000)]})
    work: dict[str, Callable[[], None]] = {
        "brackets": lambda: post(url, b"[" * (37 << 20), own),
        "most brackets": lambda: post(url, b"[[]," * (most // 3), own),
        "numbers": lambda: post(url, b"[" + b"1," * (most - 10) + b"1]", own),
        "prompts of numbers": lambda: post(
            url, json.dumps({"model": model, "prompt": [[9] * 900] * 200}), own
        ),
        "a long text": lambda: post(
            url, json.dumps({"model": model, "prompt": "a " * (15 << 20)}), own
        ),
        "no key": lambda: post(url, b"[" * (37 << 20), {"Content-Type": "application/json"}),
        "bodies that do not end": lambda: post(url, dripping(), own),
        "requests": lambda: post(url, prompts(), own),
        "forget": lambda: post(root + "/semkv/v1/forget", names, own),
        "precompute": lambda: post(
            root + "/semkv/v1/precompute",
            json.dumps(
                {
                    "documents": [
                        {
                            "name": f"d{rng.random()}",
                            "chunks": [" ".join(rng.choices(["a", "lamp", "crane"], k=150))] * 1,
                        }
                        for _ in range(40)
                    ]
                }
            ),
            own,
        ),
    }

    def forever() -> None:
        while True:
            work[kind]()

    threads = [threading.Thread(target=forever, daemon=True) for _ in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


KINDS = (
    *("brackets", "most brackets", "numbers", "prompts of numbers", "a long text", "no key"),
    *("bodies that do not end", "requests", "forget", "precompute"),
)


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]


def plot(rows: list[dict[str, Any]]) -> Callable[[Any], None]:
    """Bars: p95 alone and beside, by what the other one sends."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        places = range(len(rows))
        for shift, name in ((-0.2, "alone"), (0.2, "beside")):
            heights = [row[f"{name}_p95_ms"] for row in rows]
            axes.bar([place + shift for place in places], heights, 0.4, label=name)
        axes.set_xticks(list(places), [row["kind"] for row in rows], rotation=40, ha="right")
        axes.set_ylabel("p95 of time to first token, ms")
        axes.legend()

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=READER)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--requests", type=int, default=2, help="a namespace's, under way at a time"
    )
    parser.add_argument("--step-tokens", type=int, default=128, help="vLLM's, of one step at most")
    parser.add_argument("--clients", type=int, default=8, help="threads of the one who sends")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--send", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        kind, base, key, model, clients, most = args.send
        send(kind, base, key, model, int(clients), int(most))
        return
    from semkv_rag.server.limits import Limits  # takes seconds: not in the sender's process

    most = str(Limits().json_values)
    rows = []
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        limits = json.dumps({"requests": args.requests})
        extra = ("--limits", limits, "--max-num-batched-tokens", str(args.step_tokens))
        with Server(args.model, Path(folder), extra) as server:
            ahead = run_ahead()
            measured(server, 5, rng)
            for kind in args.kinds:
                alone = measured(server, args.seconds / 2, rng)
                command = [sys.executable, __file__, "--send", kind, server.base_url]
                command += [server.tenant_key, server.model, str(args.clients), most]
                other = subprocess.Popen(command, preexec_fn=lambda: os.nice(10))
                try:
                    time.sleep(2)
                    beside = measured(server, args.seconds, rng)
                finally:
                    other.kill()
                    other.wait()
                time.sleep(2)
                rows.append(
                    {
                        "kind": kind,
                        "alone_p50_ms": statistics.median(alone),
                        "alone_p95_ms": p95(alone),
                        "beside_p50_ms": statistics.median(beside),
                        "beside_p95_ms": p95(beside),
                        "ratio_p95": p95(beside) / p95(alone),
                        "asked": len(beside),
                    }
                )
                print(
                    f"{kind:24} alone p95 {rows[-1]['alone_p95_ms']:7.1f} ms, beside"
                    f" {rows[-1]['beside_p95_ms']:7.1f} ms, ratio {rows[-1]['ratio_p95']:.2f}",
                    flush=True,
                )
    figures = {
        "model": args.model.name,
        "question_tokens": QUESTION_TOKENS,
        "requests": args.requests,
        "step_tokens": args.step_tokens,
        "asker_ahead": ahead,
        "seconds": args.seconds,
    }
    save("one_client", {**figures, "rows": rows}, plot(rows))


if __name__ == "__main__":
    main()
