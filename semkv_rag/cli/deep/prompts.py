"""Prompts of random tokens whose chunks are stored, and plain and blended answers to them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import Completion, Engine
from semkv_rag.errors import EngineError
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkKey, chunk_id

CHUNK = 512
TEXT = 16
QUESTION = 32
ANSWER = 4
HELD_S = 10.0
"""An aborted request is held by the steps under way at most."""
NAMESPACE = "doctor"
ALONE: dict[str, Any] = {"skip_reading_prefix_cache": True}
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": ANSWER,
    "logprobs": 5,
    "ignore_eos": True,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt whose chunks are in the engine's store.

    Attributes:
        tokens: text that nobody has stored, the chunks, a question.
    """

    tokens: tuple[int, ...]


def random_tokens(engine: Engine, seed: int, count: int) -> list[int]:
    """Tokens from the middle of the vocabulary, where no special ones stand."""
    size, source = len(engine.tokenizer), random.Random(seed)  # noqa: S311
    return [source.randrange(size // 8, size - size // 8) for _ in range(count)]


def store_prompt(engine: Engine, seed: int, length: int) -> Stored:
    """A prompt of `length` tokens, whose chunks are computed and stored.

    Raises:
        EngineError: a chunk could not be stored.
    """
    assert engine.store is not None
    covered = length - TEXT - QUESTION
    sizes = [CHUNK] * (covered // CHUNK) + [covered % CHUNK] * (covered % CHUNK > 0)
    chunks = [random_tokens(engine, seed + 1 + n, size) for n, size in enumerate(sizes)]
    empty, items = token_array([]), []
    for chunk in chunks:
        array = token_array(chunk)
        identity = chunk_id(engine.fingerprint, NAMESPACE, empty, array)
        items.append(CaptureItem(identity, NAMESPACE, "document", array, empty))
    for result in engine.capture(items):
        if result.error is not None:
            raise EngineError(f"a chunk could not be stored: {result.error}")
    engine.store.add([ChunkKey(item.id, engine.fingerprint, NAMESPACE) for item in items])
    tokens = random_tokens(engine, seed, TEXT)
    for chunk in chunks:
        tokens += chunk
    return Stored((*tokens, *random_tokens(engine, seed - 1, QUESTION)))


def another_question(engine: Engine, prompt: Stored, number: int) -> Stored:
    """The same chunks and another question: the worker remembers what it picked for a prompt.

    Args:
        number: of the question; each is another one.
    """
    question = random_tokens(engine, 70_000 + number, QUESTION)
    return Stored((*prompt.tokens[:-QUESTION], *question))


def plain(engine: Engine, prompt: Sequence[int], **sampling: Any) -> Completion:
    """The answer of plain vLLM, every token of the prompt computed."""
    asked = {**GREEDY, **ALONE, **sampling}
    return engine.generate(prompt, sampling=asked, reuse=ReuseOptions(enabled=False))


def blended(
    engine: Engine, prompt: Stored, *, ratio: float | None = None, **sampling: Any
) -> Completion:
    """The answer with reuse, under the engine's options or a ratio.

    vLLM's prefix cache may hold the prompt; `forget` empties it.
    """
    chosen = {} if ratio is None else {"ratio": ratio}
    options = ReuseOptions.from_mapping({**chosen, "namespace": NAMESPACE}, engine.reuse)
    return engine.generate(prompt.tokens, sampling={**GREEDY, **sampling}, reuse=options)


def forget(engine: Engine) -> None:
    """Empty vLLM's prefix cache, as soon as no request holds part of it: one may just be aborted.

    Raises:
        EngineError: a request holds on to it.
    """
    until = time.monotonic() + HELD_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > until:
            raise EngineError("vLLM's prefix cache could not be emptied")
        time.sleep(0.05)


def largest_difference(one: Completion, other: Completion) -> float:
    """The largest difference of the same tokens' log-probabilities, as far as both answers agree."""
    assert one.logprobs is not None and other.logprobs is not None
    largest = 0.0
    for place, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
        if one.token_ids[:place] != other.token_ids[:place]:
            break
        common = a.keys() & b.keys()
        if not common:
            return float("inf")
        largest = max(largest, *(abs(a[token] - b[token]) for token in common))
    return largest
