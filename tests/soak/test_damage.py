"""Chunk files damaged at random under a running engine: plain vLLM's answers, and a reason."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from semkv_rag.engine import Engine
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.inside import open_chunk_files

pytestmark = pytest.mark.soak

FAULTS = 40
CHUNKS = 4


def flip_bits(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 2, 50))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def grow(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 5000)))


def overwrite(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    begin = rng.randrange(len(data))
    length = rng.randrange(1, 4096)
    data[begin : begin + length] = rng.randbytes(len(data[begin : begin + length]))
    path.write_bytes(data)


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def swap(path: Path, rng: random.Random) -> None:
    """Another chunk's file under this name."""
    others = [other for other in path.parent.parent.rglob("*.safetensors") if other != path]
    path.write_bytes(rng.choice(others).read_bytes())


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    flip_bits, cut, grow, overwrite, delete, swap,
]  # fmt: skip


@pytest.mark.timeout(0)
def test_whatever_happens_to_a_file(engine: Engine, namespace: str, rounds: int) -> None:
    """Each chunk stands behind the ones before, so what is loaded is used as it is: nothing mends it."""
    assert engine.store is not None
    rng = random.Random(rounds)
    refused = 0
    for fault in range(FAULTS * rounds):
        own = f"{namespace}-{fault}"
        prompt: list[int] = []
        chunks = []
        for number in range(CHUNKS):
            tokens = random_tokens(10_000 * fault + number, 60)
            chunks += store_chunks(engine, [tokens], namespace=own, context=prompt)
            prompt = prompt + tokens
        prompt += random_tokens(fault, 9)
        reference = plain(engine, prompt)
        for victim in rng.sample(chunks, rng.choice((1, 2, CHUNKS - 1))):
            path = engine.store.path(engine.fingerprint, own, victim.id)
            rng.choice(DAMAGES)(path, rng)
        # A request finds one bad file, which is not tried again.
        for _ in range(CHUNKS):
            engine.reset_prefix_cache()
            answer = blended(engine, prompt, namespace=own)
            assert_same(answer, reference)
            assert open_chunk_files(engine) == []
            if answer.report.kv_cache == "hit":
                break
            assert answer.report.reason
            assert answer.report.reused_tokens == answer.report.exact_tokens == 0
            refused += 1
    assert refused > FAULTS * rounds * 0.8, "nearly every damage is seen"
