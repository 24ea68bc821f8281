"""An hour of everything at once: every answer as alone, and memory and file descriptors stay flat."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.answers import assert_same, plain
from workbench.chunks import Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import open_chunk_files, process_of

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(0)]
logger = logging.getLogger(__name__)  # shown with --log-cli-level=INFO

MINUTES = float(os.environ.get("SOAK_LOAD_MINUTES", "60"))
SAMPLING = {"temperature": 0.0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True}
ASKERS = 16
NAMESPACES = ("default", "a", "b")
CROWDED = {
    # 40 blocks of 32 tokens: about four requests fit at a time.
    "num_gpu_blocks_override": 40,
    "block_size": 32,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
}
CAPTURED_BYTES = 4 << 20
STORED_BYTES = 12 << 20
SAMPLE_S = 15.0

EXACT = (
    ReuseOptions(ratio=1.0),
    ReuseOptions(selector="all"),
    ReuseOptions(enabled=False),
)
"""With these an answer is plain vLLM's, whatever is stored at the moment."""


@dataclass
class Load:
    """What goes on in one engine, and what it was seen to do."""

    engine: Engine
    rng: random.Random
    chunks: list[Tokens]
    prompts: list[Tokens]
    right: list[Completion]
    until: float
    seen: Counter[str] = field(default_factory=Counter)
    bytes: list[int] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)

    async def ask(self) -> None:
        """Ask one prompt after another; some answers are not waited for."""
        while time.monotonic() < self.until:
            number = self.rng.randrange(len(self.prompts))
            options = {
                **self.rng.choice(EXACT).to_mapping(),
                "namespace": self.rng.choice(NAMESPACES),
            }
            reuse = ReuseOptions.from_mapping(options)
            if self.rng.random() < 0.2:
                await self._leave(self.prompts[number], reuse)
                continue
            answer = await self.engine.agenerate(
                self.prompts[number], sampling=SAMPLING, reuse=reuse
            )
            assert_same(answer, self.right[number])
            report = answer.report
            self.seen["answers"] += 1
            self.seen["preemptions"] += report.preemptions
            self.seen["blends"] += report.reused_tokens > 0
            self.seen["of stored prompts"] += report.served_by is not None
            self.seen["found in the prefix cache"] += report.cached_tokens > 0

    async def _leave(self, prompt: Tokens, reuse: ReuseOptions) -> None:
        """Go away before the first token, or behind some."""
        parts = self.rng.randrange(4)
        async with aclosing(self.engine.astream(prompt, sampling=SAMPLING, reuse=reuse)) as stream:
            if not parts:
                asking = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(self.rng.random() / 10)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            else:
                async for _ in stream:
                    parts -= 1
                    if not parts:
                        break
        self.seen["aborts"] += 1

    def change_the_store(self) -> None:
        """Store chunks and evict what was not used for longest, over and over."""
        store = self.engine.store
        assert store is not None
        while time.monotonic() < self.until:
            some = self.rng.sample(self.chunks, 3)
            store_chunks(self.engine, some, namespace=self.rng.choice(NAMESPACES))
            self.seen["chunks stored"] += len(some)
            self.seen["evicted"] += len(store.evict(STORED_BYTES))
            time.sleep(0.5)

    async def watch(self) -> None:
        """Note memory and file descriptors of all processes."""
        own, engine = psutil.Process(), process_of(self.engine)
        while time.monotonic() < self.until:
            await asyncio.sleep(SAMPLE_S)
            family = [own, engine, *engine.children(recursive=True)]
            self.bytes.append(sum(one.memory_info().rss for one in family))
            self.handles.append(sum(one.num_fds() for one in family))
            logger.info(
                "%.0f MB, %d handles, %s",
                self.bytes[-1] / 1e6,
                self.handles[-1],
                dict(self.seen),
            )


def flat(values: list[int], slack: float) -> bool:
    """Whether the last third is no higher than the middle one, but for `slack` of it."""
    third = len(values) // 3
    return max(values[-third:]) <= max(values[third : 2 * third]) * (1 + slack)


async def test_everything_at_once(
    engines: Engines, tiny_model: Callable[[str], Path], rounds: int
) -> None:
    seed = secrets.randbits(32)
    logger.warning("seed %d", seed)
    rng = random.Random(seed)
    chunks = [random_tokens(seed + number, 60 + 7 * number) for number in range(24)]
    prompts = []
    for number in range(60):
        own = rng.sample(chunks[:12], rng.randrange(4))
        prompt = [token for chunk in own for token in [*chunk, *random_tokens(number, 3)]]
        prompts.append(prompt + random_tokens(seed + 100 + number, rng.randrange(8, 200)))
    tiers = PromptCacheOptions(capture_longer_than=150, capture_bytes=CAPTURED_BYTES)
    with engines.own(tiny_model("qwen3"), prompt_cache=tiers, encoders={}, **CROWDED) as engine:
        for namespace in NAMESPACES:
            store_chunks(engine, chunks[:12], namespace=namespace)
        right = [plain(engine, prompt, **SAMPLING) for prompt in prompts]
        until = time.monotonic() + 60 * MINUTES * rounds
        load = Load(engine, rng, chunks, prompts, right, until)
        await asyncio.gather(
            *(load.ask() for _ in range(ASKERS)),
            load.watch(),
            asyncio.to_thread(load.change_the_store),
        )
        logger.warning("%s", dict(load.seen))
        for what in ("answers", "preemptions", "blends", "of stored prompts", "aborts", "evicted"):
            assert load.seen[what] > 0, what
        assert open_chunk_files(engine) == []
        assert flat(load.bytes, 0.03), load.bytes
        assert flat(load.handles, 0.05), load.handles
        assert engine.store is not None
        assert engine.store.verify().problems == ()
