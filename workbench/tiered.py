"""The tiers around an engine that runs, as `Engine(…, prompt_cache=…)` puts them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from semkv_rag.engine import Engine
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.prompt_cache import Cascade, Encoder, PromptCacheOptions
from workbench.word_bags import WORDS


@contextmanager
def tiered(
    engine: Engine,
    options: PromptCacheOptions | None = None,
    encoders: Mapping[str, Encoder] | None = None,
) -> Iterator[PromptLookup]:
    """Have the engine ask the tiers inside the block; with bags of words as semantic vectors."""
    assert engine.store is not None and engine._capturer is not None and engine._llm is not None
    layers = {"semantic": WORDS} if encoders is None else encoders
    cascade = Cascade(engine.store, engine.fingerprint, options, layers)
    tiering = PromptLookup(cascade, engine._capturer, engine._llm)
    engine._llm.prompt_lookup = tiering
    try:
        yield tiering
    finally:
        engine._llm.prompt_lookup = None
        tiering.close()
