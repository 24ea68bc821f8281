"""Every architecture: a blend that recomputes everything is plain vLLM; others are told why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from semkv_rag.engine import Engine
from workbench.answers import assert_same, blended, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines

ON_VLLM_CLASSES = ("llama", "qwen3", "qwen2_yarn", "qwen2_moe", "gemma2", "gptj", "deepseek_v2")
ON_TRANSFORMERS_BACKEND = ("olmo2", "glm", "phi")
SERVED = ON_VLLM_CLASSES + ON_TRANSFORMERS_BACKEND
ALWAYS = ("llama", "qwen2_yarn", "qwen2_moe", "gptj", "glm")
"""One of each kind of rotation and of model class; the others in `make soak`."""
IN_BFLOAT16 = ("llama", "glm")
"""The same in bfloat16."""


def in_soak_but(always: tuple[str, ...]) -> list[object]:
    """All architectures, of which only these are tested each time."""
    return [
        arch if arch in always else pytest.param(arch, marks=pytest.mark.soak) for arch in SERVED
    ]


@dataclass
class Served:
    """An engine of one architecture with eight stored chunks."""

    engine: Engine
    chunks: list[Stored]


@pytest.fixture(scope="module", params=in_soak_but(ALWAYS))
def served(
    request: pytest.FixtureRequest, engines: Engines, tiny_model: Callable[[str], Path]
) -> Iterator[Served]:
    with engines.own(tiny_model(request.param)) as engine:
        assert engine.gate.servable, engine.gate.reason
        chunks = [random_tokens(seed, 40 + 9 * seed) for seed in range(8)]
        yield Served(engine, store_chunks(engine, chunks, namespace="default"))


def prompt_of(chunks: list[Stored], *, seed: int) -> Tokens:
    """The chunks with a little text before, between and behind them."""
    prompt = random_tokens(1000 + seed, 5)
    for index, chunk in enumerate(chunks):
        prompt = prompt + chunk.tokens + random_tokens(2000 + seed + index, 3)
    return prompt + random_tokens(3000 + seed, 9)


LAYOUTS: dict[str, Callable[[list[Stored]], Tokens]] = {
    "one chunk": lambda c: prompt_of(c[3:4], seed=1),
    "three in another order": lambda c: prompt_of([c[4], c[0], c[2]], seed=2),
    "eight": lambda c: prompt_of(c[::-1], seed=3),
    "repeated": lambda c: prompt_of([c[1], c[5], c[1]], seed=4),
    "cut short": lambda c: (
        random_tokens(71, 4) + c[6].tokens[17:] + c[2].tokens[:30] + random_tokens(72, 6)
    ),
    "nothing between": lambda c: c[7].tokens + c[3].tokens + random_tokens(73, 2),
}


def test_the_gate_moves_keys_exactly(served: Served) -> None:
    """On every layer: the keys of tokens moved by 23 positions are the keys computed there."""
    assert 0 < served.engine.gate.largest_error < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{"selector": "all"}, {"ratio": 1.0}], ids=str)
def test_recomputing_everything_is_plain(
    served: Served, layout: str, options: dict[str, object]
) -> None:
    prompt = LAYOUTS[layout](served.chunks)
    served.engine.reset_prefix_cache()
    answer = blended(served.engine, prompt, **options)
    assert answer.report.kv_cache == "hit", answer.report
    assert answer.report.recomputed_tokens == answer.report.reused_tokens > 20
    assert_same(answer, plain(served.engine, prompt))


def test_reusing_without_recomputing_is_not_plain(served: Served) -> None:
    """Else the test above would say nothing: contexts do change these models' answers."""
    prompt = LAYOUTS["eight"](served.chunks)
    answer = blended(served.engine, prompt, selector="none")
    assert answer.report.recomputed_tokens == 0
    assert answer.logprobs != plain(served.engine, prompt).logprobs


@pytest.mark.parametrize("arch", in_soak_but(IN_BFLOAT16))
def test_bfloat16_gives_the_same_tokens(
    arch: str, engines: Engines, tiny_model: Callable[[str], Path]
) -> None:
    with engines.own(tiny_model(arch), dtype="bfloat16") as engine:
        chunks = [random_tokens(seed, 40 + 9 * seed) for seed in range(4)]
        stored = store_chunks(engine, chunks, namespace="default")
        prompt = prompt_of([stored[2], stored[0], stored[3]], seed=5)
        for options in ({"selector": "all"}, {"ratio": 1.0}):
            engine.reset_prefix_cache()
            answer = blended(engine, prompt, **options)
            assert answer.report.recomputed_tokens == answer.report.reused_tokens > 100
            assert answer.token_ids == plain(engine, prompt).token_ids
