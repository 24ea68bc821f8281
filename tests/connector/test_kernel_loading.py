"""Stored KV written by the kernel, in the engine: blends are those of decoding, moving and vLLM's write.

Triton is in no environment of ours on a CPU, so torch does here what the kernel does. `tests/soak` runs
this file with the kernel itself, in Triton's interpreter, and compares the kernel alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from semkv_rag.engine import Engine
from semkv_rag.store.codecs import codec_names
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.inside import inside
from workbench.loaded_by_kernel import count, install, load_in_torch, moved_alike, remove, unmoved

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
PREFIX = random_tokens(910, 21)
QUESTION = random_tokens(911, 12)


@contextmanager
def installed(engine: Engine, load: Callable[..., None] | None) -> Iterator[bool]:
    try:
        yield inside(engine, lambda worker: install(worker, load))
    finally:
        inside(engine, remove)
        engine.reset_prefix_cache()


@pytest.mark.parametrize("codec", codec_names())
def test_blends_are_the_same(engine: Engine, namespace: str, codec: str) -> None:
    chunks = store_chunks(engine, [random_tokens(s, 90) for s in (1, 2, 3)], namespace=namespace)
    prompt = PREFIX + [token for chunk in chunks for token in chunk.tokens] + QUESTION
    assert engine.store is not None
    assert engine.store.recode(codec, namespace=namespace).failures == ()
    engine.reset_prefix_cache()
    right = blended(engine, prompt, namespace=namespace, ratio=0.2)
    with installed(engine, None if INTERPRETED else load_in_torch) as passed:
        assert passed
        engine.reset_prefix_cache()
        inside(engine, count)
        by_kernel = blended(engine, prompt, namespace=namespace, ratio=0.2)
        assert inside(engine, count) > 0
        assert by_kernel.report.reused_tokens == right.report.reused_tokens == 270
        assert_same(by_kernel, right)
        engine.reset_prefix_cache()
        assert_same(blended(engine, prompt, namespace=namespace, ratio=1.0), plain(engine, prompt))


@pytest.mark.skipif(INTERPRETED, reason="torch takes the kernel's place")
@pytest.mark.parametrize("wrong", [unmoved, moved_alike])
def test_a_kernel_that_is_wrong_is_not_used(engine: Engine, wrong: Callable[..., None]) -> None:
    with installed(engine, wrong) as passed:
        assert not passed
