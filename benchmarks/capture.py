"""What it costs a request that its prompt is captured: the same engine, capture on against capture off.

Every request has a prompt of its own that no tier knows, so both sides look it up, miss and prefill it
whole; only one side's KV is kept, written and made a donor. No encoder: its time is the same on both
sides, and would hide what is measured. Two ways to ask:

alone     pairs of requests, one of each side in turns, with nothing left to be written before each: what
          a capture costs its own request, its time to first token and its whole answer
stream    requests one right behind the other, so that the file of one is written while the next is
          computed: two with capture, two without, and so on. Of each two the second counts: with
          capture it bears its own and the writing of the one before, without it bears nothing. It is
          compared with the mean of the seconds before and behind. The engine is asked what was written
          as often as without load, so that this, too, falls into the requests that count

Beside the times of `alone` stands the processor time of the worker's thread in the model's steps, where
K and V are kept: whoever else uses the machine does not count in it, nor waiting for the writing threads.

Times of requests differ by some per cent for no reason of ours, so what a capture does is measured on its
own, too: how long it holds up the model's thread, which copies (`held`), and the processor time that its
own threads, which write, take beside it (`beside`). Their sum, over the whole answer without capture, is
what a capture would cost if nothing ran beside anything; the caches and the memory that they share with
the model are not in it.

Ratios are taken over neighbours, and their median is given with the middle half of them and with the
range in which the median lies at 95 % confidence (the streams, not their ratios, are drawn for it). On a
machine that others use too that range is wide; many short requests narrow it soonest:
--lengths 512 --answer-tokens 1 --pairs 300 --streams 30.

    python benchmarks/capture.py [--lengths 1024,4096] [--pairs 40] [--streams 3] [--model FOLDER]

Writes build/bench/capture.json and capture.png. Ends with 1 when captures cost more than 2 %, alone or in
streams. Half an hour to three quarters on two cores.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

from semkv_rag.engine import Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.chunks import random_tokens
from workbench.figures import save, summary
from workbench.inside import inside
from workbench.tiered import tiered

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets `inside` measure in the worker

TARGET = 1.02
WARM_UP = 3
RUNS = 21
"""Of a stream: without capture and with it in turns, the first and the last without."""
RUN = 2
ON, OFF = "on", "off"


class Asking:
    """Sends requests to one engine, with capture on or off."""

    def __init__(self, engine: Engine, answer_tokens: int) -> None:
        self._engine = engine
        self._sampling = {"max_tokens": answer_tokens, "temperature": 0.0, "ignore_eos": True}
        self._vocabulary = min(len(engine.tokenizer), 1000)
        self._seed = 0
        inside(engine, watch)

    def alone(self, side: str, length: int) -> dict[str, float]:
        """ms of a request; its capture is stored before this returns, after the clock has stopped."""
        ((times,), own) = self._ask([side], length)
        return {**times, **own}

    def stream(self, length: int) -> tuple[list[dict[str, float]], dict[str, float]]:
        """ms of the requests that count, one of each run, and what each capture took."""
        sides = [(OFF, ON)[run % 2] for run in range(RUNS) for _ in range(RUN)]
        times, own = self._ask(sides, length)
        return times[RUN - 1 :: RUN], {what: own[what] / sides.count(ON) for what in OWN}

    def _ask(
        self, sides: Sequence[str], length: int
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Requests one behind the other, each with a prompt of its own; and what `spent` says of all."""
        prompts = [
            random_tokens(self._seed + n, length, self._vocabulary) for n in range(len(sides))
        ]
        self._seed += len(sides)
        self._engine.reset_prefix_cache()
        assert self._engine.store is not None
        inside(self._engine, spent)
        times = []
        with tiered(self._engine, encoders={}) as tiering:
            for side, prompt in zip(sides, prompts, strict=True):
                tiering.prompts_of(None)[0].options = PromptCacheOptions(capture=side == ON)
                began = time.perf_counter()
                answer = self._engine.generate(prompt, sampling=self._sampling)
                total = 1000 * (time.perf_counter() - began)
                times.append({"ttft": answer.ttft_ms, "total": total})
                assert answer.report.kv_cache == "miss" and answer.report.cached_tokens == 0
            tiering.settle()
        own = inside(self._engine, spent)
        stored = self._engine.store.evict(0, kind="prompt")
        assert len(stored) == sides.count(ON), "every capture was stored"
        return times, own


def watch(worker: Any) -> None:
    """Have a worker measure its steps and its captures; called in its process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker.bench_ms = {"steps": 0.0, "held": 0.0}
    worker.bench_beside_ms = 0.0

    def measured(function: Any, what: str, clock: Any) -> Any:
        def measuring(*arguments: Any, **options: Any) -> Any:
            began = clock()
            try:
                return function(*arguments, **options)
            finally:
                worker.bench_ms[what] += 1000 * (clock() - began)

        return measuring

    worker.execute_model = measured(worker.execute_model, "steps", time.thread_time)
    capture = get_kv_transfer_group().executor._capture
    capture.keep = measured(capture.keep, "held", time.perf_counter)


def spent(worker: Any) -> dict[str, float]:
    """ms since it was last asked: `steps`, `held` and `beside`."""
    times: dict[str, float] = worker.bench_ms
    worker.bench_ms = dict.fromkeys(times, 0.0)
    beside = 1000 * sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("semkv-") and thread.ident is not None
    )
    times["beside"] = beside - worker.bench_beside_ms
    worker.bench_beside_ms = beside
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, help="default: 24 layers of random weights")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or build_model(Path(folder) / "mid")
        with Engine(
            str(model),
            store=Path(folder) / "store",
            dtype="bfloat16",
            max_model_len=max(lengths) + 128,
            kv_cache_memory_bytes=1 << 30,
            seed=0,
        ) as engine:
            asking = Asking(engine, arguments.answer_tokens)
            results = [measure(asking, length, arguments) for length in lengths]
    figures = {"target": TARGET, "answer_tokens": arguments.answer_tokens, "lengths": results}
    print(save("capture", figures, lambda figure: draw(figure, results)))
    worst = max(
        result[way][what]["ratio"]["median"] for result in results for way in WAYS for what in TIMES
    )
    if worst > TARGET:
        sys.exit(f"a capture costs {worst - 1:.1%} of a request, {TARGET - 1:.0%} are allowed")


TIMES = ("ttft", "total")
WHAT = {"ttft": "first token", "total": "whole answer", "steps": "model thread"}
WAYS = {"alone": tuple(WHAT), "stream": TIMES}
OWN = ("held", "beside")


def build_model(folder: Path) -> Path:
    from workbench.tiny_models import build_tiny_model

    return build_tiny_model("mid", folder)


def measure(asking: Asking, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One prompt length's figures."""
    result: dict[str, Any] = {"prompt_tokens": length}
    pairs = []
    for number in range(-WARM_UP, arguments.pairs):
        times = {s: asking.alone(s, length) for s in ((ON, OFF) if number % 2 else (OFF, ON))}
        if number >= 0:
            pairs.append(times)
    own = [times[ON] for times in pairs]
    result["alone"] = told("alone", length, own, {what: compared(pairs, what) for what in WHAT})
    streams, in_streams = zip(
        *(asking.stream(length) for _ in range(arguments.streams)), strict=True
    )
    compared_streams = {what: compared_in_streams(streams, what) for what in TIMES}
    result["stream"] = told("stream", length, list(in_streams), compared_streams)
    return result


def told(
    way: str, length: int, own: Sequence[dict[str, float]], figures: dict[str, Any]
) -> dict[str, Any]:
    """The figures of a way to ask, printed, with what captures themselves took."""
    figures["own_ms"] = {what: summary([times[what] for times in own]) for what in OWN}
    own_ms = [figures["own_ms"][what]["median"] for what in OWN]
    figures["own_share"] = round(sum(own_ms) / figures["total"]["off_ms"]["median"], 4)
    for what in WAYS[way]:
        figure = figures[what]
        print(
            f"{length:5} tokens, {way:6} {WHAT[what]:12} {figure['off_ms']['median']:8.1f} ms off,"
            f" {figure['on_ms']['median']:8.1f} on, ratio {figure['ratio']['median']:.4f}"
            f" (middle half {figure['middle_half']}, median within {figure['median_within']})",
            flush=True,
        )
    print(
        f"{length:5} tokens, {way:6} a capture holds up the model {own_ms[0]:.1f} ms and works"
        f" {own_ms[1]:.1f} ms beside it: {figures['own_share']:.4f} of the whole answer",
        flush=True,
    )
    return figures


def compared(pairs: Sequence[dict[str, dict[str, float]]], what: str) -> dict[str, Any]:
    on, off = ([times[side][what] for times in pairs] for side in (ON, OFF))
    return about(on, off, [[one / other] for one, other in zip(on, off, strict=True)])


def compared_in_streams(streams: Sequence[list[dict[str, float]]], what: str) -> dict[str, Any]:
    """Each request with capture over the geometric mean of the two without beside it."""
    on = [[times[what] for times in stream[1::2]] for stream in streams]
    off = [[times[what] for times in stream[0::2]] for stream in streams]
    ratios = [
        [
            one / math.sqrt(before * behind)
            for one, before, behind in zip(ons, offs[:-1], offs[1:], strict=True)
        ]
        for ons, offs in zip(on, off, strict=True)
    ]
    return about(list(chain(*on)), list(chain(*off)), ratios)


def about(
    on: Sequence[float], off: Sequence[float], ratios: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """The figures of a time; `ratios` in groups that have nothing to do with each other."""
    every = sorted(ratio for group in ratios for ratio in group)
    quarter = len(every) // 4
    return {
        "on_ms": summary(on),
        "off_ms": summary(off),
        "ratio": summary(every),
        "middle_half": [round(every[quarter], 4), round(every[-quarter - 1], 4)],
        "median_within": median_within(ratios),
        "ratios": len(every),
    }


def median_within(ratios: Sequence[Sequence[float]]) -> list[float]:
    """The range of the median at 95 % confidence, by bootstrap over groups of one size."""
    chance = np.random.default_rng(0)
    drawn = chance.choice(np.asarray(ratios), (4000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=(1, 2)), (2.5, 97.5))
    return [round(float(low), 4), round(float(high), 4)]


def draw(plot: Any, results: Sequence[dict[str, Any]]) -> None:
    axes = plot.subplots()
    names, medians, spread = [], [], []
    for result in results:
        for way in WAYS:
            for what in WAYS[way]:
                figure = result[way][what]
                names.append(f"{result['prompt_tokens']} tokens, {way}\n{WHAT[what]}")
                median = figure["ratio"]["median"]
                medians.append(median)
                spread.append([abs(median - end) for end in figure["middle_half"]])
    axes.errorbar(medians, range(len(names)), xerr=np.transpose(spread), fmt="o", capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(1.0, color="gray")
    axes.axvline(TARGET, color="black", linestyle="--", label="target")
    axes.set_xlabel("capture on / capture off (median, middle half)")
    axes.invert_yaxis()
    axes.legend()


if __name__ == "__main__":
    main()
