"""All checks in turn, in less than ten minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from semkv_rag.cli.deep.equality import check_equality
from semkv_rag.cli.deep.inside import (
    BLOCKS,
    RUNS,
    check_attention,
    check_copying,
    check_layout,
)
from semkv_rag.cli.deep.latency import check_latency
from semkv_rag.cli.deep.neighbours import check_neighbours
from semkv_rag.cli.deep.progress import Steps
from semkv_rag.cli.deep.prompts import ANSWER, store_prompt
from semkv_rag.cli.deep.result import FIX, Result
from semkv_rag.cli.output import in_words
from semkv_rag.connector.messages import GateReport
from semkv_rag.engine import Engine
from semkv_rag.errors import SemKVError

LENGTHS = (1000, 4000, 8000)
OF_A_LENGTH = ("ratio 1.0", "ttft", "stall", "neighbours")
MOST_S = 540.0
GROWTH = 1.5
"""A prompt of twice the length takes about two to this power as long."""


@dataclass(frozen=True)
class Deep:
    """What all checks found.

    Attributes:
        about: the device, the model and its cache.
        took_s: all of them, in seconds, without the engine's start.
    """

    about: Mapping[str, Any]
    took_s: float
    results: list[Result]

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "about": dict(self.about),
            "took_s": round(self.took_s, 1),
            "results": [asdict(result) for result in self.results],
        }


def run(start: Callable[[], AbstractContextManager[Engine]]) -> tuple[GateReport, Deep | None]:
    """Start an engine and check it: whether its model is served with reuse, and if so, all else.

    Args:
        start: an engine with an empty store.

    Raises:
        EngineError: it does not start, or stopped.
    """
    steps = Steps(2 + 1 + len(RUNS) + len(LENGTHS))
    with steps.shown():
        steps.begin("Starting the engine")
        with start() as engine:
            if not engine.gate.servable:
                return engine.gate, None
            began = time.monotonic()
            (about, *_) = engine.probe("about")
            results = list(_results(engine, about, steps, began + MOST_S))
            return engine.gate, Deep(about, time.monotonic() - began, results)


def _results(
    engine: Engine, about: Mapping[str, Any], steps: Steps, until: float
) -> Iterator[Result]:
    steps.begin("Layout: random blocks are read back")
    layers = in_words(about["layers"], "layer")
    yield from _guarded("layout", layers, check_layout, engine, about)
    for runs in RUNS:
        case = in_words(runs, "run")
        steps.begin(f"Attention: {case} of rows against a dense reference")
        yield from _guarded("attention", case, check_attention, engine, about, runs)
    steps.begin("Copies into the cache and out of it")
    yield from _guarded("copies", in_words(BLOCKS, "block"), check_copying, engine)
    took, before = 0.0, LENGTHS[0]
    for index, length in enumerate(LENGTHS):
        steps.begin(f"Prompts of {in_words(length, 'token')}: plain, blended, beside others")
        expected = took * (length / before) ** GROWTH
        begin = time.monotonic()
        if length + ANSWER > engine.max_model_len:
            yield from _left_out(length, f"max_model_len is {engine.max_model_len:,}")
        elif begin + expected > until:
            yield from _left_out(length, f"it would take about {expected:,.0f} s more")
        else:
            case, seed = in_words(length, "token"), 1000 * (index + 1)
            yield from _guarded("prompts", case, _of_length, engine, about, length, seed)
            took, before = time.monotonic() - begin, length


def _of_length(
    engine: Engine, about: Mapping[str, Any], length: int, seed: int
) -> Iterator[Result]:
    prompt = store_prompt(engine, seed=seed, length=length)
    yield check_equality(engine, about, prompt)
    yield check_latency(engine, prompt)
    yield from check_neighbours(engine, about, prompt)


def _guarded(
    check: str, case: str, look: Callable[..., Result | Iterator[Result]], *arguments: Any
) -> Iterator[Result]:
    """What `look` finds; a result of its own where it cannot look."""
    try:
        found = look(*arguments)
        yield from [found] if isinstance(found, Result) else found
    except SemKVError as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        yield Result(check, case, "fail", message=reason, fix=FIX)


def _left_out(length: int, reason: str) -> Iterator[Result]:
    for check in OF_A_LENGTH:
        yield Result(check, in_words(length, "token"), "left out", message=reason)
