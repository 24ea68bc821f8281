"""What the LLM classes of LlamaIndex and LangChain add to the engine's own call, per request.

One engine with the reader, a prompt of three stored documents that vLLM's prefix cache
holds, and eight answer tokens: what is left of the model's own time is small and the same for all. In
each round every way is timed once, in an order of its own; a class's share is the median over rounds of
its time less that of the engine's call in the same round (`Engine.respond`, which takes the same text or
messages through vLLM's own OpenAI layer). `Engine.generate` stands beside them, which leaves that out.

    python benchmarks/integrations.py [--rounds 300]

Writes build/bench/integrations.json and integrations.png. Ends with 1 when a class adds 2 ms or more.
About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from langchain_core.messages import HumanMessage
from langchain_semkv import ChatSemKV, SemKVLLM
from llama_index.core.llms import ChatMessage
from llama_index.llms.semkv import SemKV

from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine
from workbench.figures import save, summary

READER = ROOT / "examples" / "reader"
CORPUS = ROOT / "examples" / "corpus"
DOCUMENTS = ("mok-pis", "som-mel", "zur-stul")
TOKENS = 8
FIELDS: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
TARGET_MS = 2.0
WARM_UP = 20

# What a class is compared with: the engine's call of the same kind.
TEXT, MESSAGES, TEXT_STREAM, MESSAGES_STREAM = (
    "Engine.respond(text)",
    "Engine.respond(messages)",
    "Engine.respond_stream(text)",
    "Engine.respond_stream(messages)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that the LLM classes add to a request.")
    parser.add_argument("--rounds", type=int, default=300)
    rounds: int = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory() as store,
        Engine(
            str(READER), store=store, dtype="float32", kv_cache_memory_bytes=256 << 20
        ) as engine,
    ):
        precompute(engine, [CORPUS], chunk_tokens=32)
        calls, against = make_calls(engine, make_prompt())
        times = measure(calls, rounds)
    figures = evaluate(times, against)
    for name, added in figures["added_ms"].items():
        print(f"{name:45} {added['median']:7.3f} ms over {against[name]}")
    path = save("integrations", figures, lambda figure: plot(figure, figures))
    print(path)
    worst = max(added["median"] for added in figures["added_ms"].values())
    if worst >= TARGET_MS:
        sys.exit(f"{worst:.2f} ms are added, {TARGET_MS} ms are allowed")


def make_prompt() -> str:
    texts = [(CORPUS / "schools" / f"{name}.txt").read_text() for name in DOCUMENTS]
    return "\n".join(texts) + "Question : who leads Zur stul ? Answer :"


def make_calls(
    engine: Engine, prompt: str
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Every way to ask, and for those of a class the engine's call it is compared with."""
    messages = [{"role": "user", "content": prompt}]
    own: dict[str, Any] = {"engine": engine, "max_tokens": TOKENS, "sampling": {"ignore_eos": True}}
    llama, chain, chain_text = SemKV(**own), ChatSemKV(**own), SemKVLLM(**own)
    loop = asyncio.new_event_loop()

    def drain(parts: Any) -> None:
        for _ in parts:
            pass

    calls: dict[str, Callable[[], object]] = {
        "Engine.generate": lambda: engine.generate(prompt, sampling=FIELDS),
        TEXT: lambda: engine.respond(prompt, fields=FIELDS),
        MESSAGES: lambda: engine.respond(messages, fields=FIELDS),
        TEXT_STREAM: lambda: drain(engine.respond_stream(prompt, fields=FIELDS)),
        MESSAGES_STREAM: lambda: drain(engine.respond_stream(messages, fields=FIELDS)),
    }
    classes: dict[str, tuple[Callable[[], object], str]] = {
        "LlamaIndex SemKV.complete": (lambda: llama.complete(prompt, formatted=True), TEXT),
        "LlamaIndex SemKV.chat": (lambda: llama.chat([ChatMessage(prompt)]), MESSAGES),
        "LlamaIndex SemKV.achat": (
            lambda: loop.run_until_complete(llama.achat([ChatMessage(prompt)])),
            MESSAGES,
        ),
        "LlamaIndex SemKV.stream_complete": (
            lambda: drain(llama.stream_complete(prompt, formatted=True)),
            TEXT_STREAM,
        ),
        "LlamaIndex SemKV.stream_chat": (
            lambda: drain(llama.stream_chat([ChatMessage(prompt)])),
            MESSAGES_STREAM,
        ),
        "LangChain SemKVLLM.invoke": (lambda: chain_text.invoke(prompt), TEXT),
        "LangChain ChatSemKV.invoke": (lambda: chain.invoke([HumanMessage(prompt)]), MESSAGES),
        "LangChain ChatSemKV.ainvoke": (
            lambda: loop.run_until_complete(chain.ainvoke([HumanMessage(prompt)])),
            MESSAGES,
        ),
        "LangChain SemKVLLM.stream": (lambda: drain(chain_text.stream(prompt)), TEXT_STREAM),
        "LangChain ChatSemKV.stream": (
            lambda: drain(chain.stream([HumanMessage(prompt)])),
            MESSAGES_STREAM,
        ),
    }
    calls |= {name: call for name, (call, _) in classes.items()}
    return calls, {name: engine_call for name, (_, engine_call) in classes.items()}


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    names = list(calls)
    for number in range(WARM_UP + rounds):
        order.shuffle(names)
        for name in names:
            began = time.perf_counter()
            calls[name]()
            elapsed = (time.perf_counter() - began) * 1000
            if number >= WARM_UP:
                times[name].append(elapsed)
    return times


def evaluate(times: dict[str, list[float]], against: dict[str, str]) -> dict[str, Any]:
    """Times and differences; the middle half of the differences says how sure they are."""
    added = {}
    for name, engine_call in against.items():
        pairs = zip(times[name], times[engine_call], strict=True)
        differences = sorted(own - engine for own, engine in pairs)
        quarter = len(differences) // 4
        added[name] = {
            **summary(differences),
            "middle_half": [round(differences[quarter], 4), round(differences[-quarter - 1], 4)],
            "over": engine_call,
        }
    return {
        "rounds": len(times[TEXT]),
        "target_ms": TARGET_MS,
        "added_ms": added,
        "times_ms": {name: summary(values) for name, values in times.items()},
    }


def plot(figure: Any, figures: dict[str, Any]) -> None:
    axes = figure.subplots()
    added = figures["added_ms"]
    names = list(added)[::-1]
    medians = [added[name]["median"] for name in names]
    spread = [
        [abs(added[name]["median"] - added[name]["middle_half"][side]) for name in names]
        for side in (0, 1)
    ]
    axes.barh(names, medians, xerr=spread)
    axes.axvline(TARGET_MS, color="black", linestyle="--", label="target")
    axes.set_xlabel("ms added to the engine's own call (median, middle half)")
    axes.legend()


if __name__ == "__main__":
    main()
