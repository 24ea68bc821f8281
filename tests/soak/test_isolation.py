"""Two tenants who ask alike, thousands of times: never a token across."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.engines import Engines
from workbench.pairs import BLOCK, pairs, spill

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

PAIRS = 5_000


def test_pairs(engines: Engines, reader: Path, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    logger.warning("seed %d", seed)
    # Half of them with prompts that are stored in passing.
    for share, options in enumerate(
        ({}, {"prompt_cache": PromptCacheOptions(capture_longer_than=3 * BLOCK), "encoders": {}})
    ):
        with engines.own(reader, **options) as engine:
            every = list(pairs(seed + share, PAIRS // 2 * rounds))
            seen = spill(engine, ("default" if share else "one", "two"), every)
        logger.warning("%d pairs, %d tokens found again by their owners", seen.pairs, seen.own)
        assert seen.found == []
        assert seen.own > seen.pairs * BLOCK / 4
