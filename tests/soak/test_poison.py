"""A thousand requests behind chunks that no model computes: answered as by a fresh engine."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from workbench.answers import SAMPLING, assert_same, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.poison import VALUES, poison

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

LATER = 1_000
TOGETHER = 20


def test_a_thousand_later_requests(engines: Engines, reader: Path, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    logger.warning("seed %d", seed)
    rng = random.Random(seed)
    prompts = [random_tokens(rng.randrange(1 << 60), rng.randrange(1, 200)) for _ in range(100)]
    # So small that blocks are used again at once.
    small = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 512}
    with engines.own(reader, **small) as fresh:
        expected = [plain(fresh, prompt) for prompt in prompts]
    options = {**SAMPLING, "skip_reading_prefix_cache": True}
    asked = 0
    with engines.own(reader, **small) as engine:
        assert engine.store is not None
        while asked < LATER * rounds:
            namespace = f"n{asked}"
            tokens = random_tokens(rng.randrange(1 << 60), rng.randrange(40, 200))
            (chunk,) = store_chunks(engine, [tokens], namespace=namespace)
            begin = rng.randrange(len(tokens))
            poison(
                engine.store.path(engine.fingerprint, namespace, chunk.id),
                rng.choice(list(VALUES.values())),
                rng.randrange(-1, 5),
                rng.randrange(2),
                slice(begin, begin + rng.randrange(1, 40)),
            )
            prompt = random_tokens(rng.randrange(1 << 60), rng.randrange(1, 40)) + tokens + [9, 10]
            reuse = ReuseOptions(ratio=rng.choice((0.0, 0.15, 0.5)), namespace=namespace)
            engine.generate(prompt, sampling=SAMPLING, reuse=reuse)
            some = rng.sample(range(len(prompts)), TOGETHER)
            answers = engine.generate_many(
                [prompts[index] for index in some],
                sampling=options,
                reuse=ReuseOptions(enabled=False),
            )
            for index, answer in zip(some, answers, strict=True):
                assert_same(answer, expected[index])
            asked += len(some)
    logger.warning("%d requests", asked)
