"""What a plan needs to know of a machine, measured on it."""

from __future__ import annotations

from collections.abc import Iterator

from semkv_rag.cli.deep.latency import check_latency
from semkv_rag.cli.deep.progress import Steps
from semkv_rag.cli.deep.prompts import (
    NAMESPACE,
    blended,
    forget,
    plain,
    random_tokens,
    store_prompt,
)
from semkv_rag.cli.output import in_words
from semkv_rag.corpus import precompute_texts
from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError
from semkv_rag.planning import Measured, Timing, timing_of

LENGTHS = (500, 1000, 2000, 4000)
ANSWER = 8
SEED = 50_000
CHUNK, CHUNKS = 250, 8
"""Chunks of the document that is stored: the tokens of each, and how many there are."""


def measure(engine: Engine) -> Timing:
    """Plain prefill, blends and storing, at several lengths of prompt.

    Args:
        engine: with an empty store; it is used by nobody else.

    Raises:
        EngineError: the engine's model is not served with reuse, has no room for two of the lengths, or
            stopped.
    """
    if not engine.gate.servable:
        raise EngineError(f"the model is not served with reuse: {engine.gate.reason}")
    lengths = [length for length in LENGTHS if length + ANSWER <= engine.max_model_len]
    if len(lengths) < 2:
        raise EngineError(
            f"max_model_len is {engine.max_model_len:,}: prompts of {LENGTHS[1]:,} tokens are needed"
        )
    steps = Steps(2 + len(lengths))
    with steps.shown():
        steps.begin("First requests, which warm up the engine")
        warm = store_prompt(engine, seed=10, length=lengths[0])
        plain(engine, warm.tokens)
        blended(engine, warm)
        found = list(_lengths(engine, lengths, steps))
        steps.begin(f"A document of {in_words(CHUNKS * CHUNK, 'token')}: stored")
        rate = _storing_rate(engine)
    return timing_of(found, engine.kv_bytes_per_token, rate)


def _storing_rate(engine: Engine) -> float:
    """Tokens of a document that are stored in a second. A token counts in each of its contexts.

    Raises:
        EngineError: it could not be stored.
    """
    texts = [
        engine.tokenizer.decode(random_tokens(engine, SEED + number, CHUNK))
        for number in range(CHUNKS)
    ]
    stored = precompute_texts(engine, [("measured", texts)], namespace=NAMESPACE)
    if stored.failures:
        raise EngineError(f"a document could not be stored: {stored.failures[0].reason}")
    return stored.tokens / stored.computing_seconds


def _lengths(engine: Engine, lengths: list[int], steps: Steps) -> Iterator[Measured]:
    """Each length's times."""
    for number, length in enumerate(lengths, 1):
        steps.begin(f"Prompts of {in_words(length, 'token')}: stored, plain, blended")
        prompt = store_prompt(engine, seed=1000 * number, length=length)
        plain(engine, prompt.tokens, max_tokens=1)
        forget(engine)
        blended(engine, prompt, max_tokens=1)
        figures = check_latency(engine, prompt).figures
        yield Measured(
            length,
            figures["plain_ms"],
            figures["blend_ms"],
            figures["load_ms"],
            figures["charged_ratio"],
        )
